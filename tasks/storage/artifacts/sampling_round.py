"""What a draw leaves: rollouts, and what each reward thought of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.storage.artifacts.reference import ArtifactRef

SCORES_FILE = "scores.parquet"


@dataclass(frozen=True)
class SamplingRound:
    """One collection of rollouts, scored.

    Attributes:
        rollouts: the samples.
        rewards: by the reward's label, a table with a row a sample each.
    """

    rollouts: ArtifactRef
    rewards: Mapping[str, ArtifactRef]

    @property
    def stages(self) -> tuple[ArtifactRef, ...]:
        """All of them, rollouts first."""
        return (self.rollouts, *self.rewards.values())
