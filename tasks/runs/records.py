"""Frozen records of stored sampling rounds, iterations and evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.storage.artifacts.reference import ArtifactRef


@dataclass(frozen=True)
class SamplingRound:
    """One collection of rollouts, with a table of scores by reward label; each has a row per sample."""

    rollouts: ArtifactRef
    rewards: Mapping[str, ArtifactRef]

    @property
    def stages(self) -> tuple[ArtifactRef, ...]:
        """All artifacts, rollouts first."""
        return (self.rollouts, *self.rewards.values())


@dataclass(frozen=True)
class StoredIteration:
    """One stored iteration, every file verified.

    Attributes:
        number: from 1.
        rounds: the sampling rounds that the advantages cover.
        advantages: advantages of the samples of all rounds.
        samplers: version and digest of the policies that sampled the rows.
    """

    number: int
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef
    samplers: frozenset[tuple[int, str]]

    def staleness(self, version: int) -> int:
        """Return the fewest versions between a row's policy and a policy that is trained on the rows."""
        return min(abs(version - sampler) for sampler, _ in self.samplers)


@dataclass(frozen=True)
class StoredEvaluation:
    """One evaluation, every file verified; rewards and guardrails are tables of scores by label."""

    rollouts: ArtifactRef
    advantages: ArtifactRef
    rewards: Mapping[str, ArtifactRef]
    guardrails: Mapping[str, ArtifactRef]
