"""Files of processes that are gone: what was asked of work pools, and what was being written."""

import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from tasks.execution.call import CALLS
from tasks.pruning.prunable import modified
from tasks.storage.artifacts.store import INCOMING, ArtifactStore
from tasks.storage.filesystem.files import is_local
from tasks.storage.filesystem.staging import locked_file

CALLS_ARE_KEPT = timedelta(days=1)
"""Longer than any stage takes; a run that was ended looks for the answer to its calls when it goes on."""


def old_calls(store: ArtifactStore, now: datetime) -> list[str]:
    """Paths of calls and answers that nobody waits for any more."""
    paths = store.filesystem.find(store.path(CALLS)) if store.filesystem.exists(store.path(CALLS)) else []
    return sorted(path for path in paths if now - modified(store, path) > CALLS_ARE_KEPT)


def abandoned_writes(store: ArtifactStore) -> list[str]:
    """Folders that a process was writing in when it was ended; nothing is changed."""
    if not is_local(store.filesystem):
        return []
    return [str(folder) for folder in _abandoned(Path(store.path(INCOMING)))]


def _abandoned(incoming: Path) -> Iterator[Path]:
    for folder in sorted(path for path in incoming.glob("*") if path.is_dir()):
        lock = next(folder.glob("lock"), None)
        if lock is None:
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError), locked_file(lock, wait=False):
            yield folder
