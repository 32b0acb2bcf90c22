"""One run's folder. An artifact is a folder with a manifest beside it; without the manifest it is not there."""

import contextlib
import hashlib
import json
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import fsspec

from grpo_core.errors import InputError
from tasks.storage.failures import StorageError, storage_failures_told
from tasks.storage.files import is_local, publish_folder, sha256_of, write_whole
from tasks.storage.manifest import opened, sealed
from tasks.storage.reference import ArtifactRef, StaleReferenceError
from tasks.storage.staging import clear_abandoned, staging_folder

SET_ASIDE = "set_aside"
INCOMING = ".incoming"
MANIFEST_ENDING = ".manifest.json"
_READING = threading.Lock()


class ArtifactStore:
    """Artifacts of one run under a storage root that may be any fsspec URL."""

    def __init__(self, root: str, run: str) -> None:
        """Point at a run; nothing is written yet.

        Raises:
            InputError: a URL of an unknown kind, or of one whose package is not installed.
        """
        try:
            self.filesystem, path = fsspec.core.url_to_fs(str(Path(root).expanduser()) if "://" not in root else root)
        except (ImportError, ValueError) as error:
            mend = f"{error}. Give a folder or a URL of a known kind, such as s3://, and install what reads it."
            raise InputError("storage.root", root, mend) from error
        self.root = path.rstrip("/")
        self.run = run
        self.reasons: list[str] = []
        """Why things were set aside since this store was opened, for people to be told."""

    def path(self, relative: str = "") -> str:
        """Where something of this run is, for the filesystem."""
        return f"{self.root}/{self.run}/{relative}".rstrip("/")

    def require_writable(self) -> None:
        """Raise InputError unless the run's folder can be written to."""
        probe = f"{INCOMING}/probe-{uuid.uuid4().hex[:8]}"
        try:
            self.write_file(probe, b"")
            self.filesystem.rm_file(self.path(probe))
        except (OSError, StorageError) as error:
            raise InputError("storage.root", self.root, f"It cannot be written ({error}); choose another.") from error

    def clear_abandoned(self) -> None:
        """Remove what a killed process left half-written; what a living one is writing is left alone."""
        if is_local(self.filesystem):
            clear_abandoned(Path(self.path(INCOMING)))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A local folder to write an artifact's files into; on the root's own disk where the root is local.

        Raises:
            StorageError: the disk is full or read-only.
        """
        local = is_local(self.filesystem)
        with storage_failures_told(self.filesystem, self.root), contextlib.ExitStack() as stack:
            if local:
                parent = stack.enter_context(staging_folder(Path(self.path(INCOMING))))
            else:
                parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-")))
            folder = parent / "files"
            folder.mkdir()
            yield folder

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

        What stood in that place is set aside, never overwritten.
        """
        local = fsspec.filesystem("file")
        files = {
            path.relative_to(staged).as_posix(): sha256_of(local, str(path))
            for path in sorted(staged.rglob("*"))
            if path.is_file()
        }
        self._clear_place(folder)
        publish_folder(self.filesystem, staged, self.path(folder))
        described = {
            "digest": digest,
            "schema_version": schema_version,
            "rows": rows,
            "seconds": seconds,
            "metrics": metrics,
            "files": files,
        }
        manifest = sealed(described)
        self._write_manifest(folder, manifest, staged)
        return self._reference(f"{self.run}/{folder}", manifest)

    def _write_manifest(self, folder: str, manifest: bytes, staged: Path) -> None:
        write_whole(self.filesystem, self._manifest(self.path(folder)), manifest, scratch=staged.parent)

    def _manifest(self, folder: str) -> str:
        return f"{folder}{MANIFEST_ENDING}"

    def _reference(self, uri: str, manifest: bytes) -> ArtifactRef:
        described = opened(manifest)
        described.pop("files")
        return ArtifactRef(uri=uri, sha256=hashlib.sha256(manifest).hexdigest(), **described)

    def find(self, folder: str) -> ArtifactRef | None:
        """The whole artifact in this place of the run, if there is one."""
        try:
            manifest: bytes = self.filesystem.cat_file(self._manifest(self.path(folder)))
            reference = self._reference(f"{self.run}/{folder}", manifest)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return reference if self._damage(self.path(folder), reference) is None else None

    def _damage(self, folder: str, reference: ArtifactRef) -> str | None:
        """What is wrong with the artifact in `folder`, or None when it is what the reference says."""
        name = f"{reference.folder.rsplit('/', 1)[-1]}{MANIFEST_ENDING}"
        try:
            manifest: bytes = self.filesystem.cat_file(self._manifest(folder))
        except FileNotFoundError:
            return f"{name} is missing"
        sha256 = hashlib.sha256(manifest).hexdigest()
        if sha256 != reference.sha256:
            return f"{name} has sha256 {sha256[:12]}, not {reference.sha256[:12]}"
        for file, expected in opened(manifest)["files"].items():
            try:
                found = sha256_of(self.filesystem, f"{folder}/{file}")
            except FileNotFoundError:
                return f"{file} is missing"
            if found != expected:
                return f"{file} has sha256 {found[:12]}, not {expected[:12]}"
        return None

    def local_files(self, reference: ArtifactRef, folder: Path | None = None) -> Path:
        """The artifact's folder on this machine, every file verified.

        Args:
            reference: of an artifact of this root.
            folder: where to copy a remote artifact; not used for a local root.

        Raises:
            StaleReferenceError: missing or changed; what is there is set aside first.
        """
        # Stages at work side by side read the same artifact: one of them alone may move it away, and the file system of
        # memory:// hands all of them one open file.
        with _READING:
            path = f"{self.root}/{reference.uri}"
            if damage := self._damage(path, reference):
                if reference.run == self.run:
                    self._clear_place(reference.folder, reason=damage)
                raise StaleReferenceError(f"{reference.uri}: {damage}; start the run again and the stage is done again")
            if is_local(self.filesystem):
                return Path(path)
            assert folder is not None, "a remote artifact needs a local folder"
            self.filesystem.get(f"{path}/", f"{folder}/", recursive=True)
            return folder

    def bring_home(self, reference: ArtifactRef) -> ArtifactRef:
        """The same artifact in its place in this run: found there, or copied from another run or what was set aside.

        Raises:
            StaleReferenceError: it is nowhere, or nowhere whole; what is damaged is set aside first.
        """
        home = reference.model_copy(update={"uri": f"{self.run}/{reference.folder}"})
        damage = self._damage(self.path(home.folder), home)
        if damage is None:
            return home
        for place in self._other_places(reference):
            if self._damage(place, reference) is None:
                return self._copy_home(place, home, damage)
        # A whole one is what another configuration made; the stage that replaces it says so.
        if self.find(home.folder) is None:
            self._clear_place(home.folder, reason=damage)
        raise StaleReferenceError(f"{reference.uri}: {damage}")

    def _other_places(self, reference: ArtifactRef) -> Iterator[str]:
        yield f"{self.root}/{reference.uri}"
        for run in dict.fromkeys([self.run, reference.run]):
            for aside in sorted(self.filesystem.glob(f"{self.root}/{run}/{SET_ASIDE}/*"), reverse=True):
                yield f"{aside}/{reference.folder}"

    def _copy_home(self, place: str, home: ArtifactRef, damage: str) -> ArtifactRef:
        with self.staging() as staged:
            self.filesystem.get(f"{place}/", f"{staged}/", recursive=True)
            manifest: bytes = self.filesystem.cat_file(self._manifest(place))
            self._clear_place(home.folder, reason=None if self.find(home.folder) else damage)
            publish_folder(self.filesystem, staged, self.path(home.folder))
            self._write_manifest(home.folder, manifest, staged)
        return home

    def _clear_place(self, folder: str, *, reason: str | None = None) -> None:
        present = [
            path
            for path in (self._manifest(folder), folder)  # the manifest first: without it the folder counts for nothing
            if self.filesystem.exists(self.path(path))
        ]
        if present:
            whole = "another result of the same stage took its place"
            cut_short = "it is not whole: a file is missing or changed, or its writing was cut short"
            self.set_aside(present, reason=reason or (whole if self.find(folder) else cut_short))

    def set_aside(self, paths: list[str], *, reason: str) -> None:
        """Move paths of this run out of the way, keeping them and saying why."""
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        self.reasons.append(f"{paths[0]}{others}: {reason}")
        taken = self.filesystem.glob(self.path(f"{SET_ASIDE}/*"))
        place = f"{SET_ASIDE}/{len(taken) + 1:04d}-{uuid.uuid4().hex[:6]}"
        note = json.dumps({"reason": reason, "paths": paths}, indent=1).encode()
        self.write_file(f"{place}/reason.json", note)
        for path in paths:
            target = self.path(f"{place}/{path}")
            self.filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            if is_local(self.filesystem):
                Path(self.path(path)).rename(target)
            else:
                self.filesystem.mv(self.path(path), target, recursive=True)

    def read_file(self, name: str) -> bytes | None:
        """A small file of the run, or None where there is none."""
        return self._read(self.path(name))

    def read_shared(self, name: str) -> bytes | None:
        """A small file that all runs of the root share, or None where there is none."""
        return self._read(f"{self.root}/{name}")

    def _read(self, path: str) -> bytes | None:
        try:
            content: bytes = self.filesystem.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file of the run, whole."""
        with self.staging() as staged:
            write_whole(self.filesystem, self.path(name), content, scratch=staged)

    def write_shared(self, name: str, content: bytes) -> None:
        """Write a small file that all runs of the root share, whole."""
        with self.staging() as staged:
            write_whole(self.filesystem, f"{self.root}/{name}", content, scratch=staged)


_CURRENT: ContextVar[ArtifactStore] = ContextVar("artifact_store")


def use_store(store: ArtifactStore) -> None:
    """Make this the store that tasks of the present context read and write."""
    _CURRENT.set(store)


def current_store() -> ArtifactStore:
    """The store of the present context."""
    return _CURRENT.get()
