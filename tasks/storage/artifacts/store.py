"""A run's artifacts: each is a folder with a manifest next to it; a folder without a manifest is no artifact.

Writing: the files are staged, moved to their place, and the manifest is written last. Reading: every file is verified
against the manifest. Damaged files move to `quarantine/`; a valid artifact that another one replaces moves to
`previous/`, from where it can be restored. Pruning replaces the manifest by a tombstone and then deletes files.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tasks.storage.artifacts.files import ArtifactFiles
from tasks.storage.artifacts.manifest import MANIFEST_ENDING, Manifest, read_manifest
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.replace import LINEAGE, pruned_error, restored_tombstone
from tasks.storage.artifacts.run_description import RUN_FILE
from tasks.storage.filesystem.checked_json import load_checked
from tasks.storage.filesystem.failures import translate_remote_errors
from tasks.storage.filesystem.files import (
    files_below,
    fsync_path,
    hashes_of,
    is_local,
    move_folder,
    settle_folder,
    write_file_atomically,
)
from tasks.storage.filesystem.read_cache import ReadCache, default_cache
from tasks.storage.filesystem.run_folder import INCOMING, PREVIOUS, QUARANTINE, RunFolder

__all__ = ["INCOMING", "MANIFEST_ENDING", "PREVIOUS", "QUARANTINE", "ArtifactStore", "current_store", "use_store"]
_REPLACED = "another result of the same stage took its place"
_CUT_SHORT = "a file is missing or changed, or its writing was cut short"
# Filesystems that read as fast as a copy of them would.
_WITHOUT_CACHE = {"file", "memory"}
_READING = threading.Lock()


class ArtifactStore(RunFolder):
    """Artifacts of one run under a storage root that may be any fsspec URL."""

    def __init__(self, root: str, run: str, cache: ReadCache | None = None) -> None:
        """Point at a run; nothing is written yet.

        Args:
            root: a folder or any fsspec URL.
            run: name of the run.
            cache: copies of files that are read from a remote root; None for the one in the user's cache folder.

        Raises:
            InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
        """
        super().__init__(root, run)
        protocol = self.filesystem.protocol
        near = _WITHOUT_CACHE & ({protocol} if isinstance(protocol, str) else set(protocol))
        self.files = ArtifactFiles(self.filesystem, cache or (None if near else default_cache()))

    def manifest_path(self, place: str) -> str:
        """Return where the manifest of the artifact in this folder of the filesystem is."""
        return f"{place}{MANIFEST_ENDING}"

    def manifest_at(self, place: str) -> Manifest | None:
        """Read the manifest of the artifact in this folder of the filesystem; None if it is missing or damaged."""
        content = self._read(self.manifest_path(place))
        try:
            return None if content is None else read_manifest(content)
        except (ValueError, TypeError):
            return None

    def valid_manifest_at(self, place: str) -> Manifest | None:
        """Read the manifest of an artifact whose files are all there and unchanged; None if there is none."""
        manifest = self.manifest_at(place)
        return manifest if manifest is not None and self.files.damage(place, manifest) is None else None

    def matching_manifest(self, place: str, reference: ArtifactRef) -> Manifest | str:
        """Read the manifest that the reference means, or return why there is none in this folder of the filesystem."""
        name = self.manifest_path(reference.folder.rsplit("/", 1)[-1])
        content = self._read(self.manifest_path(place))
        if content is None:
            return f"{name} is missing"
        try:
            manifest = read_manifest(content)
        except (ValueError, TypeError) as error:
            return f"{name} is damaged ({error})"
        if not manifest.matches(reference):
            return f"{name} has sha256 {manifest.sha256[:12]}, not {reference.sha256[:12]}"
        return manifest

    def find(self, folder: str) -> ArtifactRef | None:
        """Return the valid artifact in this folder of the run if there is one; it may be pruned (`pruned_reason`)."""
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.valid_manifest_at(self.path(folder))
        try:
            return None if manifest is None else manifest.reference(f"{self.run}/{folder}")
        except (ValueError, TypeError):
            return None

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

        An artifact in that place is moved away, never overwritten. If another writer of the stage was first and has the
        same result, its artifact is kept and returned.

        Raises:
            StorageError: a disk or a bucket refuses it.
            StaleReferenceError: the run does not request it any more.
        """
        if self.requested is not None and self.read_file(self.requested) is None:
            reason = "the run has its result or continues with another configuration, so the request is withdrawn"
            raise StaleReferenceError(f"{self.run}/{folder}: {reason}")
        described = {
            "digest": digest,
            "schema_version": schema_version,
            "rows": rows,
            "seconds": seconds,
            "metrics": metrics,
        }
        manifest = Manifest(described, hashes_of(staged))
        assert manifest.content, "a metric that is not finite is refused before anything is moved"
        if is_local(self.filesystem):
            settle_folder(staged)
        with translate_remote_errors(self.filesystem, self.root), self.commit_lock():
            place = self.path(folder)
            standing = self.manifest_at(place)
            if standing is not None and standing.equals_in_result(manifest):
                if self.files.damage(place, standing) is None:
                    return standing.reference(f"{self.run}/{folder}")
                manifest = Manifest(described, manifest.files, previous=(standing.sha256, *standing.previous))
            self.clear_place(folder)
            self._put(staged, folder, manifest)
            self.write_manifest(folder, manifest, staged.parent)
        return manifest.reference(f"{self.run}/{folder}")

    def _put(self, staged: Path, folder: str, manifest: Manifest) -> None:
        """Move settled files to their place; the caller has the commit lock and has cleared the place."""
        place = self.path(folder)
        if is_local(self.filesystem):
            move_folder(staged, Path(place))
            return
        for name, file in files_below(staged).items():
            self.put_file(file, f"{place}/{name}", manifest.files[name])

    def put_file(self, file: Path, path: str, sha256: str) -> None:
        """Put a settled local file into its place, or into the place of an older one, in one step."""
        if not is_local(self.filesystem):
            self.filesystem.put_file(str(file), path)
            self.files.keep(path, file, sha256)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        fsync_path(target.parent)

    def write_manifest(self, folder: str, manifest: Manifest, scratch: Path) -> None:
        """Write or replace the manifest of an artifact of the run in one step; the caller has the commit lock."""
        self.require_commit_lock()
        path = self.manifest_path(self.path(folder))
        write_file_atomically(self.filesystem, path, manifest.content, scratch=scratch)

    def clear_place(self, folder: str, *, reason: str | None = None) -> None:
        """Move what is in this place of the run to `previous/` if it is valid, else to `quarantine/`.

        Args:
            folder: the artifact's, within the run.
            reason: what is wrong with it; None to check it.
        """
        # The manifest moves first: without it the folder is no artifact.
        present = [path for path in (self.manifest_path(folder), folder) if self.filesystem.exists(self.path(path))]
        if not present:
            return
        if reason is None and self.valid_manifest_at(self.path(folder)) is not None:
            self.move_to_previous(present, reason=_REPLACED)
        else:
            self.quarantine(present, reason=reason or _CUT_SHORT)

    def local_files(self, reference: ArtifactRef, folder: Path | None = None) -> Path:
        """Return the artifact's folder on this machine, every file verified.

        Args:
            reference: an artifact of this root.
            folder: where to put the files of a remote artifact; not used for a local root.

        Raises:
            StaleReferenceError: it is missing or changed; its files are moved to `quarantine/` first.
            PrunedArtifactError: its files were deleted on purpose.
            StorageError: a bucket does not return them.
        """
        # Concurrent stages read the same artifact: only one of them may move it away, and memory:// gives all of them
        # one open file.
        with _READING, translate_remote_errors(self.filesystem, self.root):
            place = f"{self.root}/{reference.uri}"
            damage = self._read_files(place, reference, folder)
            if damage is None:
                return Path(place) if folder is None or is_local(self.filesystem) else folder
            if reference.run == self.run:
                with self.commit_lock():
                    # Another process may have made it again meanwhile.
                    if self.damage(place, reference):
                        self.clear_place(reference.folder, reason=damage)
            raise StaleReferenceError(f"{reference.uri}: {damage}; start the run again and the stage runs again")

    def _read_files(self, place: str, reference: ArtifactRef, folder: Path | None) -> str | None:
        manifest = self.matching_manifest(place, reference)
        if isinstance(manifest, str):
            manifest = restored_tombstone(self, reference) or manifest
        if isinstance(manifest, str):
            return manifest
        if manifest.pruned is not None and not manifest.files:
            raise pruned_error(self, reference, manifest)
        if is_local(self.filesystem):
            return self.files.damage(place, manifest)
        assert folder is not None, "a remote artifact needs a local folder"
        return self.files.fetch(place, manifest, folder)

    def damage(self, place: str, reference: ArtifactRef) -> str | None:
        """Return what is wrong with the artifact in this folder of the filesystem; None if it matches the reference."""
        manifest = self.matching_manifest(place, reference)
        return manifest if isinstance(manifest, str) else self.files.damage(place, manifest)

    def restore_artifact(self, reference: ArtifactRef) -> ArtifactRef:
        """Return the same artifact in its place in this run, copied from another run or from `previous/` if need be.

        A pruned artifact counts as present while its tombstone is there. It is restored from `previous/` only if the
        run has the same lineage as when the artifact was pruned, since another one may need the deleted files.

        Raises:
            StaleReferenceError: there is no valid copy; damaged files are moved to `quarantine/` first.
            StorageError: a bucket does not answer.
        """
        home = reference.model_copy(update={"uri": f"{self.run}/{reference.folder}"})
        with translate_remote_errors(self.filesystem, self.root):
            damage = self.damage(self.path(home.folder), home)
            if damage is None or restored_tombstone(self, home) is not None:
                return home
            for place in self._other_places(reference):
                manifest = self.matching_manifest(place, reference)
                if not isinstance(manifest, Manifest) or not self._may_restore(place, manifest, home.folder):
                    continue
                if self.files.damage(place, manifest) is None:
                    self._copy(place, manifest, home.folder, damage)
                    return home
            with self.commit_lock():
                # A valid one belongs to another configuration; the stage that replaces it moves it.
                if self.valid_manifest_at(self.path(home.folder)) is None:
                    self.clear_place(home.folder, reason=damage)
        raise StaleReferenceError(f"{reference.uri}: {damage}")

    def _other_places(self, reference: ArtifactRef) -> Iterator[str]:
        yield f"{self.root}/{reference.uri}"
        for run in dict.fromkeys([self.run, reference.run]):
            for previous in sorted(self.filesystem.glob(f"{self.root}/{run}/{PREVIOUS}/*"), reverse=True):
                yield f"{previous}/{reference.folder}"

    def _may_restore(self, place: str, manifest: Manifest, folder: str) -> bool:
        if manifest.pruned is None:
            return True
        lineage = manifest.pruned.get(LINEAGE)
        return place.startswith(f"{self.path()}/") and lineage is not None and lineage == lineage_of(self, folder)

    def _copy(self, source: str, manifest: Manifest, folder: str, damage: str) -> None:
        place = self.path(folder)
        with self.staging() as staged, self.commit_lock():
            self.clear_place(folder, reason=None if self.valid_manifest_at(place) else damage)
            for name, sha256 in manifest.files.items():
                if is_local(self.filesystem):
                    (staged / name).parent.mkdir(parents=True, exist_ok=True)
                    self.filesystem.get_file(f"{source}/{name}", str(staged / name))
                else:
                    self.filesystem.cp_file(f"{source}/{name}", f"{place}/{name}")
                    self.files.note_copy(f"{source}/{name}", f"{place}/{name}", sha256)
            if is_local(self.filesystem):
                settle_folder(staged)
                move_folder(staged, Path(place))
            self.write_manifest(folder, manifest, staged.parent)

    def pruned_reason(self, reference: ArtifactRef) -> Mapping[str, Any] | None:
        """Return what was deleted from an artifact and why, as given to `replace_artifact`; None if nothing was.

        Raises:
            StaleReferenceError: the artifact there does not match the reference.
        """
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.matching_manifest(f"{self.root}/{reference.uri}", reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        return manifest.pruned


def lineage_of(store: RunFolder, folder: str = "", file: str = RUN_FILE) -> str | None:
    """Return a digest of what made the artifact in a folder of the run; None if the description lacks it.

    Args:
        store: the run.
        folder: folder of the artifact. Evaluations also depend on the held-out prompts.
        file: the description, within the run.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError):
        described = load_checked(store.read_file(file) or b"{}")
        lineage: str = described[LINEAGE]
        return f"{lineage} {described['evaluation']}" if folder.startswith("evaluations/") else lineage
    return None


_CURRENT: ContextVar[ArtifactStore] = ContextVar("artifact_store")


def use_store(store: ArtifactStore) -> None:
    """Make this the store that tasks of the current context read and write."""
    _CURRENT.set(store)


def current_store() -> ArtifactStore:
    """Return the store of the current context."""
    return _CURRENT.get()
