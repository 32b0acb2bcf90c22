"""A run's artifacts: each a folder and, beside it, a manifest; without the manifest it is not there."""

import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import fsspec

from tasks.storage.artifacts.commit import commit_folder, create_manifest, write_manifest
from tasks.storage.artifacts.lineage import LINEAGE, lineage_of
from tasks.storage.artifacts.manifest import Manifest, written
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.replace import pruned_error, replace_folder, restored_manifest
from tasks.storage.artifacts.verified_folder import MANIFEST_ENDING, ValidFolder
from tasks.storage.filesystem.failures import translate_remote_errors
from tasks.storage.filesystem.files import files_below, is_local, move_folder, settle_folder, sha256_of
from tasks.storage.filesystem.run_folder import INCOMING, SET_ASIDE

__all__ = ["INCOMING", "MANIFEST_ENDING", "SET_ASIDE", "ArtifactStore", "current_store", "use_store"]
_READING = threading.Lock()


class ArtifactStore(ValidFolder):
    """Artifacts of one run under a storage root that may be any fsspec URL."""

    def commit(
        self,
        staged: Path,
        folder: str,
        *,
        digest: str,
        schema_version: int,
        rows: int,
        seconds: float,
        metrics: dict[str, float],
    ) -> ArtifactRef:
        """Move staged files to their place and then write the manifest that makes them an artifact.

        What stood in that place is set aside, never overwritten. Where another writer of the same stage was first and
        has the same result, that stays and is returned.

        Raises:
            StorageError: a bucket does not take it, or others keep writing the same artifact.
            StaleReferenceError: the run does not ask for it any more.
        """
        if self.requested is not None and self.read_file(self.requested) is None:
            reason = "the run has its answer, or goes on with another configuration, and does not ask for it any more"
            raise StaleReferenceError(f"{self.run}/{folder}: {reason}")
        local = fsspec.filesystem("file")
        described = {
            "digest": digest,
            "schema_version": schema_version,
            "rows": rows,
            "seconds": seconds,
            "metrics": metrics,
        }
        files = {name: sha256_of(local, str(path)) for name, path in files_below(staged).items()}
        with translate_remote_errors(self.filesystem, self.root):
            manifest = commit_folder(self, staged, folder, written(described, files))
        return manifest.reference(f"{self.run}/{folder}")

    def find(self, folder: str) -> ArtifactRef | None:
        """The whole artifact in this place of the run, if there is one; `pruned_reason` says what it is without."""
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.valid_manifest_at(self.path(folder))
        try:
            return None if manifest is None else manifest.reference(f"{self.run}/{folder}")
        except (ValueError, TypeError):
            return None

    def local_files(self, reference: ArtifactRef, folder: Path | None = None) -> Path:
        """The artifact's folder on this machine, every file verified.

        Args:
            reference: of an artifact of this root.
            folder: where to put the files of a remote artifact; not used for a local root.

        Raises:
            StaleReferenceError: missing or changed; what is there is set aside first.
            PrunedArtifactError: its files were removed on purpose.
            StorageError: a bucket does not give them out.
        """
        # Stages at work side by side read the same artifact: one of them alone may move it away, and the file system of
        # memory:// hands all of them one open file.
        with _READING, translate_remote_errors(self.filesystem, self.root):
            place = f"{self.root}/{reference.uri}"
            damage = self._read_files(place, reference, folder)
            if damage is None:
                return Path(place) if folder is None or is_local(self.filesystem) else folder
            if reference.run == self.run:
                with self.alone():
                    # It may be whole meanwhile: another process made it again.
                    if self.damage(place, reference):
                        self.clear_place(reference.folder, reason=damage)
            raise StaleReferenceError(f"{reference.uri}: {damage}; start the run again and the stage is done again")

    def _read_files(self, place: str, reference: ArtifactRef, folder: Path | None) -> str | None:
        manifest = self.matching_manifest(place, reference)
        if isinstance(manifest, str):
            manifest = restored_manifest(self, reference) or manifest
        if isinstance(manifest, str):
            return manifest
        if manifest.pruned is not None and not manifest.files:
            raise pruned_error(self, reference, manifest)
        if is_local(self.filesystem):
            return self.files.damage(place, manifest)
        assert folder is not None, "a remote artifact needs a local folder"
        return self.files.fetch(place, manifest, folder)

    def restore_artifact(self, reference: ArtifactRef) -> ArtifactRef:
        """The same artifact in its place in this run: found there, or copied from another run or what was set aside.

        One that was pruned in its place is there as long as its manifest is. It comes back from where it was set aside
        if the run is again what it was when it was pruned; otherwise, as from another run, it is not brought: whoever
        asks may need what it lacks.

        Raises:
            StaleReferenceError: it is nowhere, or nowhere whole; what is damaged is set aside first.
            StorageError: a bucket does not say.
        """
        home = reference.model_copy(update={"uri": f"{self.run}/{reference.folder}"})
        with translate_remote_errors(self.filesystem, self.root):
            damage = self.damage(self.path(home.folder), home)
            if damage is None or restored_manifest(self, home) is not None:
                return home
            for place in self._other_places(reference):
                manifest = self.matching_manifest(place, reference)
                if not isinstance(manifest, Manifest) or not self._may_come(place, manifest, home.folder):
                    continue
                if self.files.damage(place, manifest) is None:
                    return self._copy_home(place, manifest, home, damage)
            with self.alone():
                # A whole one is what another configuration made; the stage that replaces it says so.
                if self.valid_manifest_at(self.path(home.folder)) is None:
                    self.clear_place(home.folder, reason=damage)
        raise StaleReferenceError(f"{reference.uri}: {damage}")

    def _other_places(self, reference: ArtifactRef) -> Iterator[str]:
        yield f"{self.root}/{reference.uri}"
        for run in dict.fromkeys([self.run, reference.run]):
            for aside in sorted(self.filesystem.glob(f"{self.root}/{run}/{SET_ASIDE}/*"), reverse=True):
                yield f"{aside}/{reference.folder}"

    def _may_come(self, place: str, manifest: Manifest, folder: str) -> bool:
        if manifest.pruned is None:
            return True
        lineage = manifest.pruned.get(LINEAGE)
        return place.startswith(f"{self.path()}/") and lineage is not None and lineage == lineage_of(self, folder)

    def _copy_home(self, source: str, manifest: Manifest, home: ArtifactRef, damage: str) -> ArtifactRef:
        place = self.path(home.folder)
        with self.staging() as staged, self.alone():
            if is_local(self.filesystem):
                for name in manifest.files:
                    (staged / name).parent.mkdir(parents=True, exist_ok=True)
                    self.filesystem.get_file(f"{source}/{name}", str(staged / name))
                settle_folder(staged)
            self.clear_place(home.folder, reason=None if self.valid_manifest_at(place) else damage)
            if is_local(self.filesystem):
                move_folder(staged, Path(place))
                write_manifest(self, home.folder, manifest, staged.parent)
                return home
        for name, sha256 in manifest.files.items():
            self.filesystem.cp_file(f"{source}/{name}", f"{place}/{name}")
            self.files.note_copy(f"{source}/{name}", f"{place}/{name}", sha256)
        if not create_manifest(self, self.manifest_path(place), manifest) and self.damage(place, home):
            raise StaleReferenceError(f"{home.uri}: another process wrote it while it was copied; start again")
        return home

    def replace_artifact(
        self, reference: ArtifactRef, staged: Path | None, *, pruned: Mapping[str, Any]
    ) -> ArtifactRef:
        """Replace an artifact's files of this run by fewer or smaller ones; references to it stay right.

        A process that is killed in between leaves an artifact that is whole; calling this again finishes it.

        Args:
            reference: to the artifact, or to one that it succeeded.
            staged: the files that are left, by their previous names, in a folder of `staging`; None leaves none.
            pruned: what was taken away and why, as JSON values.

        Raises:
            StaleReferenceError: what stands there is not what the reference says.
            ValueError: a file that the artifact never had.
            StorageError: a disk or a bucket does not take it.
        """
        with self.staging() as scratch, translate_remote_errors(self.filesystem, self.root):
            manifest = replace_folder(self, reference, staged, pruned, scratch)
        return manifest.reference(f"{self.run}/{reference.folder}")

    def pruned_reason(self, reference: ArtifactRef) -> Mapping[str, Any] | None:
        """What was taken away from an artifact and why, as `replace_artifact` was told; None where nothing was.

        Raises:
            StaleReferenceError: what stands there is not what the reference says.
        """
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.matching_manifest(f"{self.root}/{reference.uri}", reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        return manifest.pruned


_CURRENT: ContextVar[ArtifactStore] = ContextVar("artifact_store")


def use_store(store: ArtifactStore) -> None:
    """Make this the store that tasks of the present context read and write."""
    _CURRENT.set(store)


def current_store() -> ArtifactStore:
    """The store of the present context."""
    return _CURRENT.get()
