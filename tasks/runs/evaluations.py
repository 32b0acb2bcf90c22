"""Find stored evaluations of a run."""

from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from collections.abc import Iterator
from collections.abc import Mapping
from configs.schema import RunConfig
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation that is whole.

    Attributes:
        rollouts: its samples.
        advantages: of its samples, with their rewards.
        rewards: scores by label.
        guardrails: scores by label.
    """

    rollouts: ArtifactRef
    advantages: ArtifactRef
    rewards: Mapping[str, ArtifactRef]
    guardrails: Mapping[str, ArtifactRef]


def find_stored(store: ArtifactStore, folder: str, config: RunConfig) -> StoredEvaluation | None:
    """The evaluation in this place of the run, if all its stages are whole."""
    rollouts, advantages = store.find(f"{folder}/rollouts"), store.find(f"{folder}/advantages")
    rewards = dict(_scores(store, f"{folder}/rewards", [section.label for section in config.rewards]))
    guardrails = dict(_scores(store, f"{folder}/guardrails", [each.label for each in config.watch.guardrails]))
    if rollouts is None or advantages is None:
        return None
    if len(rewards) < len(config.rewards) or len(guardrails) < len(config.watch.guardrails):
        return None
    return StoredEvaluation(rollouts, advantages, rewards, guardrails)


def _scores(store: ArtifactStore, folder: str, labels: list[str]) -> Iterator[tuple[str, ArtifactRef]]:
    for label in labels:
        found = store.find(f"{folder}/{label}")
        if found is not None:
            yield label, found
