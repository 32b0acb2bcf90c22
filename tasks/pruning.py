"""Delete what a run can do without: images and states of rollouts, old calls, and unfinished writes.

Images and states of denoising steps are files of their own, so the other values of rollouts stay as they are. No reward
can score samples without images, and no policy can be trained on rollouts without the states of their steps.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import filter as matching
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.execution.call import CALLS
from tasks.runs.layout import IMAGES, STATES
from tasks.storage.artifacts.commit import AND, IMAGES_REMOVED, STATES_REMOVED, delete_files, left_over, removed_by
from tasks.storage.artifacts.reference import MANIFEST_ENDING, ArtifactRef, Manifest
from tasks.storage.artifacts.run_folder import INCOMING
from tasks.storage.artifacts.store import LINEAGE, ArtifactStore, lineage_of
from tasks.storage.files import is_local, locked_file

CALLS_ARE_KEPT = timedelta(days=1)  # longer than any stage takes; a run that continues looks for results of its calls
FILES_REMOVED = "files"  # what a tombstone says where every file was deleted
PARTS: Mapping[str, str] = MappingProxyType({IMAGES_REMOVED: IMAGES, STATES_REMOVED: STATES, FILES_REMOVED: "*"})
"""Patterns of the files of an artifact that are deleted, by what a tombstone says."""


@dataclass(frozen=True)
class Prunable:
    """An artifact that may be pruned, and when it was made; `half_pruned` if a process that pruned it was killed."""

    folder: str
    reference: ArtifactRef
    manifest: Manifest
    made: datetime
    half_pruned: bool

    @property
    def is_complete(self) -> bool:
        """Whether all of its files exist as its stage made them."""
        return self.manifest.pruned is None

    @property
    def has_files(self) -> bool:
        """Whether any of its files may be there that pruning deletes."""
        return self.is_complete or self.half_pruned

    @property
    def removed(self) -> tuple[str, ...]:
        """What was deleted from it, or is being deleted, in the words of its tombstone."""
        return removed_by(self.manifest.pruned)

    def names(self, part: str) -> list[str]:
        """Return the files of a part of it, one of PARTS: those that are there, and those that were deleted."""
        return matching([*self.manifest.files, *self.manifest.deleted], PARTS[part])


def find_prunable(store: ArtifactStore, folder: str) -> Prunable | None:
    """Return the artifact in a folder of the run; None if there is none that this program reads."""
    manifest = store.manifest_at(store.path(folder))
    if manifest is None:
        return None
    try:
        reference = manifest.reference(f"{store.run}/{folder}")
    except (ValueError, TypeError):
        return None
    made = _modified(store, store.path(f"{folder}{MANIFEST_ENDING}"))
    return Prunable(folder, reference, manifest, made, bool(left_over(store, folder, manifest)))


def _modified(store: ArtifactStore, path: str) -> datetime:
    written: datetime = store.filesystem.modified(path)
    return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def bytes_below(store: ArtifactStore, path: str) -> int:
    """Return the size of a file, or of all files in a folder, of the filesystem; 0 if there is none."""
    if not store.filesystem.exists(path):
        return 0
    return sum(int(each["size"] or 0) for each in store.filesystem.find(path, detail=True).values())


def part_bytes(store: ArtifactStore, prunable: Prunable, part: str) -> int:
    """Return the size of the files of a part, one of PARTS, that are there."""
    return sum(bytes_below(store, store.path(f"{prunable.folder}/{name}")) for name in prunable.names(part))


def delete_part(store: ArtifactStore, prunable: Prunable, part: str, by: str, on: datetime) -> None:
    """Delete a part of an artifact, one of PARTS; an interrupted deletion is finished under its own tombstone.

    The tombstone states the command or setting that deletes it, and the date. StaleReferenceError if the artifact has
    changed, or one of its other files is damaged.
    """
    pruned: Mapping[str, Any] = prunable.manifest.pruned or {}
    if part not in prunable.removed:
        removed, lineage = AND.join([*prunable.removed, part]), lineage_of(store, prunable.folder)
        pruned = {LINEAGE: lineage, "removed": removed, "by": by, "on": f"{on:%Y-%m-%d}"}
    delete_files(store, prunable.reference, prunable.names(part), pruned=pruned)


def old_calls(store: ArtifactStore, now: datetime) -> list[str]:
    """Return paths of calls that no run waits for."""
    folder = store.path_of(f"{store.run}/{CALLS}", deleting=True)
    paths = store.filesystem.find(folder) if store.filesystem.exists(folder) else []
    return sorted(path for path in paths if now - _modified(store, path) > CALLS_ARE_KEPT)


def abandoned_writes(store: ArtifactStore) -> list[str]:
    """Return folders in which a killed process was writing; nothing is changed."""
    if not is_local(store.filesystem):
        return []
    incoming, found = Path(store.path_of(f"{store.run}/{INCOMING}", deleting=True)), []
    for folder in sorted(path for path in incoming.glob("*") if path.is_dir() and not path.is_symlink()):
        # A folder without a lock is one that its process is about to lock.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            if (folder / "lock").exists():
                with locked_file(folder / "lock", wait=False):
                    found.append(str(folder))
    return found
