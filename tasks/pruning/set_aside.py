"""What was moved out of the way long ago: removed as a whole, unless the run may still take it back."""

from dataclasses import dataclass
from datetime import datetime

from tasks.pruning.prunable import modified
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.lineage import lineage_of
from tasks.storage.artifacts.run_description import RUN_FILE
from tasks.storage.artifacts.store import SET_ASIDE, ArtifactStore

_REASON_FILE = "reason.json"


@dataclass(frozen=True)
class SetAsideFolder:
    """One folder below `set_aside/`.

    Attributes:
        folder: within the run.
        since: when something was moved there last.
        size: in bytes.
        returns: the run's present configuration made it, so that its keys may bring it back.
    """

    folder: str
    since: datetime
    size: int
    returns: bool


def folders_set_aside(store: ArtifactStore) -> list[SetAsideFolder]:
    """All of a run, in order."""
    present = lineage_of(store)
    found = []
    for name in RunReader(store).names(SET_ASIDE):
        folder = f"{SET_ASIDE}/{name}"
        files: dict[str, dict[str, int]] = store.filesystem.find(store.path(folder), detail=True)
        if not files:
            continue
        returns = present is not None and lineage_of(store, file=f"{folder}/{RUN_FILE}") == present
        # What was moved keeps its own time; the reason is written when it is moved.
        reason = [path for path in files if path == store.path(f"{folder}/{_REASON_FILE}")]
        since = max(modified(store, path) for path in reason or files)
        found.append(SetAsideFolder(folder, since, sum(each["size"] for each in files.values()), returns))
    return found


def remove_folder(store: ArtifactStore, folder: str) -> None:
    """Remove a folder below `set_aside/`; the reason goes last, so that an ended removal is gone on with."""
    place, reason = store.path(folder), store.path(f"{folder}/{_REASON_FILE}")
    for path in store.filesystem.find(place):
        if path != reason:
            store.filesystem.rm_file(path)
    if store.filesystem.exists(place):
        store.filesystem.rm(place, recursive=True)
