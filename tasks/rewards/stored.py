"""Find stored tables that already have the requested scores."""

import json
from collections.abc import Sequence

import pyarrow.parquet as pq

from configs.scoring import RewardSection
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import provenance_of
from tasks.runs.layout import SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


def provenance_json(section: RewardSection) -> str:
    """Describe where the scores of a section come from and which samples it scores, as stored with each score.

    Two tables of the same rollouts with the same text have the same scores.

    Raises:
        InputError: a weight file is missing or not the right one.
    """
    described = provenance_of(build_reward(section.reward, section.settings))
    meant_for = {"datasets": section.datasets, "where": section.where}
    scope = {name: value for name, value in meant_for.items() if value is not None}
    return json.dumps({**described, **({"scope": scope} if scope else {})}, sort_keys=True)


def stored_provenance(store: ArtifactStore, reference: ArtifactRef) -> str | None:
    """Return the provenance of a table's scores; None for an empty table."""
    with store.filesystem.open(f"{store.root}/{reference.uri}/{SCORES_FILE}") as file:
        column = pq.ParquetFile(file).read(columns=["provenance"])["provenance"]
    return str(column[0].as_py()) if len(column) else None


def failed_scores(reference: ArtifactRef) -> int:
    """Count the samples of the table that could not be scored."""
    label = reference.folder.rsplit("/", 1)[-1]
    return int(reference.metrics.get(f"rewards/{label}/failed", 0.0))


def choose_scores(
    store: ArtifactStore, candidates: Sequence[ArtifactRef], section: RewardSection
) -> tuple[ArtifactRef | None, tuple[ArtifactRef, ...]]:
    """Choose the complete table of a section's scores, if there is one; else the tables with some of them.

    Args:
        store: of the tables.
        candidates: tables of scores of the same rollouts, from any run.
        section: the requested reward.
    """
    wanted = provenance_json(section)
    matching = [each for each in candidates if stored_provenance(store, each) == wanted]
    for reference in matching:
        if not failed_scores(reference):
            return reference, ()
    return None, tuple(matching)
