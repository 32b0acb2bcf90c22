"""Refuse to recompute damaged scores whose images were pruned."""

import contextlib
import json

from grpo_core.errors import InputError
from tasks.execution.stages import SHARDS
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import QUARANTINE, ArtifactStore


def refuse_lost_scores(store: ArtifactStore, rollouts: ArtifactRef, folder: str) -> None:
    """Refuse to compute a table of scores again if it is in quarantine and its images were pruned.

    Args:
        store: the run.
        rollouts: the samples to score.
        folder: of the table, or of a shard of it.

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
