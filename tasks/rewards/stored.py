"""Stored scores: find tables that have the requested ones already, and refuse to replace those that are lost."""

import contextlib
import json
from collections.abc import Sequence

import pyarrow.parquet as pq

from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import provenance_of
from tasks.execution.stages import SHARDS
from tasks.runs.layout import SCORES_FILE
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.run_folder import QUARANTINE
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

    The candidates are tables of scores of the same rollouts, from any run.
    """
    wanted = provenance_json(section)
    matching = [each for each in candidates if stored_provenance(store, each) == wanted]
    for reference in matching:
        if not failed_scores(reference):
            return reference, ()
    return None, tuple(matching)


def refuse_lost_scores(store: ArtifactStore, rollouts: ArtifactRef, folder: str) -> None:
    """Refuse to compute a table of scores again if it is in quarantine and its images were pruned.

    Raises:
        InputError: the table is in quarantine and the images were pruned; the command line exits with code 2.
    """
    pruned = store.pruned_reason(rollouts)
    table = _joined(folder)
    quarantined = _quarantined(store, table) if pruned is not None else None
    if pruned is None or quarantined is None:
        return
    place, reason = quarantined
    hint = (
        f"It is in {store.path(place)} ({reason}) and cannot be computed again: the images of {rollouts.uri} "
        f"were removed by `{pruned.get('by', 'grpo prune')}` on {pruned.get('on', 'an earlier day')}. Put "
        f"{store.path(table)} and {store.manifest_path(store.path(table))} back from a copy and start again, or start "
        "under another --run name, which starts from the beginning. Other iterations are untouched."
    )
    raise InputError(f"{store.run}/{table}", "damaged", hint)


def _joined(folder: str) -> str:
    """Return the folder of the complete table for the folder of a shard."""
    place, found, rest = folder.partition(f"/{SHARDS}/")
    return f"{place}/{rest.partition('/')[2]}" if found else folder


def _quarantined(store: ArtifactStore, table: str) -> tuple[str, str] | None:
    """Return where the table was last quarantined, and why; None if it never was."""
    for name in sorted(RunReader(store).names(QUARANTINE), reverse=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            reason = json.loads(store.read_file(f"{QUARANTINE}/{name}/reason.json") or b"{}")
            if table in reason["paths"] or store.manifest_path(table) in reason["paths"]:
                return f"{QUARANTINE}/{name}", str(reason["reason"])
    return None
