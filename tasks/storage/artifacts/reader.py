"""A run's artifacts, verified and never touched: what is damaged is told and left where it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.storage.artifacts.manifest import Manifest, read_manifest
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import MANIFEST_ENDING, ArtifactStore
from tasks.storage.filesystem.files import is_local, sha256_of
from tasks.storage.tables.schemas import SCHEMA_VERSION

VERIFIED_BYTES = 512 * 2**20
"""How much of what is not shown is verified nevertheless: about a second's worth of sha256."""


@dataclass(frozen=True)
class Damage:
    """A file that is not what it was when it was written.

    Attributes:
        place: the file within the run, or what else the note is about.
        reason: what is wrong with it.
    """

    place: str
    reason: str


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact whose manifest could be read.

    Attributes:
        reference: what the manifest says of it.
        manifest: what it says of the files.
    """

    reference: ArtifactRef
    manifest: Manifest

    @property
    def files(self) -> Mapping[str, str]:
        """The sha256 by name within the artifact's folder."""
        return self.manifest.files


class ArtifactReader:
    """Reads one run; collects what is damaged on the way. Unlike the store it moves nothing.

    Attributes:
        damages: what was found damaged so far, each file once.
        pruned: what was taken away on purpose from the artifacts that were found so far, by their folders.
        unverified: artifacts whose files are all there, but were too many bytes to verify.
    """

    def __init__(self, store: ArtifactStore) -> None:
        """Point at a run that exists."""
        self.store = store
        self.damages: list[Damage] = []
        self.pruned: dict[str, Mapping[str, Any]] = {}
        self.unverified = 0
        self._whole: set[str] = set()
        # Verifying a remote artifact means fetching it; there, only what is shown is worth that.
        self._left = VERIFIED_BYTES if is_local(store.filesystem) else 0

    def read_bytes(self, name: str) -> bytes | None:
        """A small file of the run; None where there is none."""
        try:
            content: bytes = self.store.filesystem.cat_file(self.store.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.damaged(name, f"it cannot be read ({error})")
            return None
        return content

    def names(self, folder: str = "") -> list[str]:
        """Sorted names of what lies directly in a folder of the run; empty where there is none."""
        try:
            found = self.store.filesystem.ls(self.store.path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def artifact_names(self, folder: str) -> list[str]:
        """Sorted names of the artifacts directly in a folder of the run."""
        found = self.names(folder)
        return [name.removesuffix(MANIFEST_ENDING) for name in found if name.endswith(MANIFEST_ENDING)]

    def damaged(self, place: str, reason: str) -> None:
        """Note a damage."""
        note = Damage(place, reason)
        if note not in self.damages:
            self.damages.append(note)

    def find(self, folder: str) -> StoredArtifact | None:
        """The artifact in this place if its manifest is whole and every file that it names is there."""
        name = f"{folder}{MANIFEST_ENDING}"
        content = self.read_bytes(name)
        if content is None:
            return None
        try:
            manifest = read_manifest(content)
            reference = manifest.reference(f"{self.store.run}/{folder}")
        except (ValueError, TypeError) as error:
            self.damaged(name, f"it is no manifest, or not as it was written ({type(error).__name__})")
            return None
        if reference.schema_version != SCHEMA_VERSION:
            reason = f"schema version {reference.schema_version}; this program reads {SCHEMA_VERSION}"
            self.damaged(folder, reason)
            return None
        if manifest.pruned is not None:
            self.pruned[folder] = manifest.pruned
        missing = [
            file for file in manifest.files if not self.store.filesystem.exists(self.store.path(f"{folder}/{file}"))
        ]
        for file in missing:
            self.damaged(f"{folder}/{file}", "it is missing")
        return None if missing else StoredArtifact(reference, manifest)

    def verify(self, artifact: StoredArtifact, only: Iterable[str] | None = None) -> bool:
        """Whether the files, or `only` these of them, have the sha256 that the manifest says."""
        folder, whole = artifact.reference.folder, True
        for name in artifact.files if only is None else only:
            try:
                found = sha256_of(self.store.filesystem, self.store.path(f"{folder}/{name}"))
            except OSError as error:
                self.damaged(f"{folder}/{name}", f"it cannot be read ({error})")
                whole = False
                continue
            if found not in artifact.manifest.accepted(name):
                self.damaged(f"{folder}/{name}", f"it has sha256 {found[:12]}, not {artifact.files[name][:12]}")
                whole = False
        if whole and only is None:
            self._whole.add(folder)
        return whole

    def verify_within_budget(self, artifact: StoredArtifact) -> bool:
        """As `verify` while the bytes last; what is too much counts as whole and as unverified."""
        folder = artifact.reference.folder
        if folder in self._whole:
            return True
        sizes = [self.store.filesystem.size(self.store.path(f"{folder}/{name}")) or 0 for name in artifact.files]
        if sum(sizes) > self._left:
            self.unverified += 1
            return True
        self._left -= sum(sizes)
        return self.verify(artifact)

    def local_folder(self, reference: ArtifactRef, fetched: Path) -> Path:
        """The artifact's folder on this machine; a remote one is copied below `fetched` first."""
        if is_local(self.store.filesystem):
            return Path(self.store.path(reference.folder))
        target = fetched / reference.folder
        target.parent.mkdir(parents=True, exist_ok=True)
        self.store.filesystem.get(f"{self.store.path(reference.folder)}/", f"{target}/", recursive=True)
        return target
