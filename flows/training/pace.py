"""How fast a run trains, and which of its results come from another run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.runs.layout import ADVANTAGES, REWARDS, ROLLOUTS, UPDATE
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


@dataclass
class Pace:
    """Seconds per iteration since the end of the first that this start trained, whose time has that of the start."""

    _begun: float | None = None
    _trained: int = 0

    def add(self, *, trained: bool) -> float | None:
        """Count an iteration that has ended, and return the seconds per iteration; None before the second trained.

        Args:
            trained: whether this start trained it; stored iterations pass in a moment.
        """
        now = time.perf_counter()
        if self._begun is None or not trained:
            self._begun, self._trained = now if trained else None, 0
            return None
        self._trained += 1
        return (now - self._begun) / self._trained


def find_reused(
    store: ArtifactStore, rounds: Sequence[SamplingRound], advantages: ArtifactRef, update: ArtifactRef
) -> dict[str, str]:
    """Return the name of the run that a stage's results were copied from, by stage; own results are left out."""
    stages = {
        ROLLOUTS: [each.rollouts for each in rounds],
        REWARDS: [scores for each in rounds for scores in each.rewards.values()],
        ADVANTAGES: [advantages],
        UPDATE: [update],
    }
    sources = {stage: [store.copied.get(each.folder) for each in parts] for stage, parts in stages.items()}
    return {stage: runs[0] for stage, runs in sources.items() if runs and runs[0] is not None and all(runs)}


def name_reused(reused: Mapping[str, str]) -> str:
    """Describe reused stages as the end of a line: `reused from run tiny`; empty without any."""
    if not reused:
        return ""
    stages = "" if len(reused) == 4 else f"{', '.join(reused)} "
    return f"{stages}reused from run {', '.join(dict.fromkeys(reused.values()))}"
