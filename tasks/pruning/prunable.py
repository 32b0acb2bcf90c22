"""An artifact as whoever prunes sees it: when it was made, what it takes, and whether it was pruned before."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from tasks.storage.artifacts.manifest import Manifest
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import MANIFEST_ENDING, ArtifactStore


class State(Enum):
    """What was taken away from an artifact."""

    WHOLE = "nothing"
    CUT_SHORT = "some of it; whoever did was ended"
    PRUNED = "all that was to be"


@dataclass(frozen=True)
class Prunable:
    """An artifact of a run.

    Attributes:
        folder: within the run.
        reference: to it.
        manifest: what it says of its files.
        made: when its manifest was written.
    """

    folder: str
    reference: ArtifactRef
    manifest: Manifest
    made: datetime

    @property
    def state(self) -> State:
        """How much of it was taken away before."""
        if self.manifest.pruned is None:
            return State.WHOLE
        return State.PRUNED if self.manifest.leaving is None else State.CUT_SHORT

    @property
    def files(self) -> list[str]:
        """Names of all files that may be there."""
        return sorted({*self.manifest.files, *(self.manifest.leaving or {})})


def look_at(store: ArtifactStore, folder: str) -> Prunable | None:
    """The artifact in a place of a run; None where there is none, or none that this program reads."""
    manifest = store.manifest_at(store.path(folder))
    if manifest is None:
        return None
    try:
        reference = manifest.reference(f"{store.run}/{folder}")
    except (ValueError, TypeError):
        return None
    return Prunable(folder, reference, manifest, modified(store, store.path(f"{folder}{MANIFEST_ENDING}")))


def modified(store: ArtifactStore, path: str) -> datetime:
    """When a file of the filesystem was written last, UTC."""
    written: datetime = store.filesystem.modified(path)
    return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def bytes_of(store: ArtifactStore, paths: Iterable[str]) -> int:
    """Size of those of these files that are there."""
    return sum(store.filesystem.size(path) or 0 for path in paths if store.filesystem.exists(path))
