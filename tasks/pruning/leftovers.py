"""Files that no run reads: old calls, unfinished writes, and folders in `previous/` and `quarantine/`."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tasks.execution.call import CALLS
from tasks.pruning.artifacts import modified
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.run_description import RUN_FILE
from tasks.storage.artifacts.store import INCOMING, PREVIOUS, QUARANTINE, ArtifactStore, lineage_of
from tasks.storage.filesystem.files import is_local, locked_file
from tasks.storage.filesystem.run_folder import REASON_FILE

CALLS_ARE_KEPT = timedelta(days=1)
"""Longer than any stage takes; a run that was stopped looks for the results of its calls when it continues."""


@dataclass(frozen=True)
class MovedFolder:
    """A folder in `previous/` or `quarantine/`.

    Attributes:
        folder: within the run.
        since: when a file was last moved there.
        size: size in bytes.
        restorable: the run's current configuration made it, so the run may restore it.
    """

    folder: str
    since: datetime
    size: int
    restorable: bool


def moved_folders(store: ArtifactStore) -> list[MovedFolder]:
    """Return all folders in `previous/` and `quarantine/` of a run, in order."""
    current = lineage_of(store)
    found = []
    for parent in (PREVIOUS, QUARANTINE):
        for name in RunReader(store).names(parent):
            folder = f"{parent}/{name}"
            files: dict[str, dict[str, int]] = store.filesystem.find(store.path(folder), detail=True)
            if not files:
                continue
            restorable = current is not None and lineage_of(store, file=f"{folder}/{RUN_FILE}") == current
            # Moved files keep their own time; the reason is written when they are moved.
            reason = [path for path in files if path == store.path(f"{folder}/{REASON_FILE}")]
            since = max(modified(store, path) for path in reason or files)
            found.append(MovedFolder(folder, since, sum(each["size"] for each in files.values()), restorable))
    return found


def delete_moved(store: ArtifactStore, folder: str) -> None:
    """Delete a folder of `previous/` or `quarantine/`; its reason goes last, so that a killed deletion is repeated."""
    place, reason = store.path(folder), store.path(f"{folder}/{REASON_FILE}")
    for path in store.filesystem.find(place):
        if path != reason:
            store.filesystem.rm_file(path)
    if store.filesystem.exists(place):
        store.filesystem.rm(place, recursive=True)


def old_calls(store: ArtifactStore, now: datetime) -> list[str]:
    """Return paths of calls and outcomes that no run waits for."""
    paths = store.filesystem.find(store.path(CALLS)) if store.filesystem.exists(store.path(CALLS)) else []
    return sorted(path for path in paths if now - modified(store, path) > CALLS_ARE_KEPT)


def abandoned_writes(store: ArtifactStore) -> list[str]:
    """Return folders in which a killed process was writing; nothing is changed."""
    if not is_local(store.filesystem):
        return []
    return [str(folder) for folder in _abandoned(Path(store.path(INCOMING)))]


def _abandoned(incoming: Path) -> Iterator[Path]:
    for folder in sorted(path for path in incoming.glob("*") if path.is_dir()):
        if not (lock := folder / "lock").exists():
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError), locked_file(lock, wait=False):
            yield folder
