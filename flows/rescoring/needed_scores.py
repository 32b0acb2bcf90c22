"""Which rewards a rescoring has to compute, and which stored scores it can use."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.scoring import RewardSection
from tasks.rewards.stored import choose_scores
from tasks.runs.layout import RESCORED, REWARDS, rescoring_folder, stage_folder
from tasks.runs.reader import RunReader
from tasks.runs.records import StoredIteration
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class NeededScores:
    """The scores of one reward over one draw.

    Attributes:
        section: the reward.
        stored: the whole table where there is one.
        earlier: else, tables that hold some of them.
    """

    section: RewardSection
    stored: ArtifactRef | None
    earlier: tuple[ArtifactRef, ...]


def needed_scores(
    store: ArtifactStore, stored: StoredIteration, rewards: Sequence[RewardSection]
) -> tuple[tuple[NeededScores, ...], ...]:
    """What each reward needs over each draw of an iteration: tables of the run and of all its rescorings count."""
    reader = RunReader(store)
    needed = []
    for draw in stored.rounds:
        place = f"{stage_folder(draw.rollouts.folder)}/{REWARDS}"
        folders = [rescoring_folder(name, place) for name in reader.names(RESCORED)]
        others = [store.find(f"{folder}/{label}") for folder in folders for label in reader.artifact_names(folder)]
        candidates = [*draw.rewards.values(), *(each for each in others if each is not None)]
        needed.append(tuple(NeededScores(each, *choose_scores(store, candidates, each)) for each in rewards))
    return tuple(needed)
