"""A run's folder under a storage root: its paths, its small files, where artifacts are staged and what is set aside."""

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from grpo_core.errors import InputError
from tasks.storage.filesystem.failures import (
    StorageError,
    UnreachableStorageError,
    translate_remote_errors,
    translate_storage_errors,
)
from tasks.storage.filesystem.files import is_local, write_whole
from tasks.storage.filesystem.roots import open_root, without_patience
from tasks.storage.filesystem.staging import clear_abandoned, locked_file, staging_folder, temporary_folder

SET_ASIDE = "set_aside"
INCOMING = ".incoming"
_COMMIT_LOCK = "commit.lock"


class RunFolder:
    """One run under a storage root that may be any fsspec URL."""

    def __init__(self, root: str, run: str) -> None:
        """Point at a run; nothing is written yet.

        Raises:
            InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
        """
        self.filesystem, self.root = open_root(root)
        self.run = run
        self.reasons: list[str] = []
        """Why things were set aside since this store was opened, for people to be told."""
        self.unread: set[str] = set()
        """Records and artifacts of finished stages that a bucket did not give out when they were asked for."""
        self.requested: str | None = None
        """File of the run that asks for what is written; a run that has its answer, or wants another, removed it."""
        self._given_root = root
        self._alone, self._depth = threading.RLock(), 0

    def path(self, relative: str = "") -> str:
        """Where something of this run is, for the filesystem."""
        return f"{self.root}/{self.run}/{relative}".rstrip("/")

    def require_writable(self) -> None:
        """Raise InputError unless files of the run can be written, listed, read and removed; in seconds."""
        probe = self.path(f"{INCOMING}/probe-{uuid.uuid4().hex[:8]}")
        try:
            if is_local(self.filesystem):
                with self.staging() as staged:
                    write_whole(self.filesystem, probe, b"probe", scratch=staged)
                self.filesystem.rm_file(probe)
                return
            filesystem = without_patience(self._given_root)
            with translate_remote_errors(filesystem, self.root):
                filesystem.pipe_file(probe, b"probe")
                readable = filesystem.cat_file(probe) == b"probe" and bool(filesystem.ls(probe.rsplit("/", 1)[0]))
                filesystem.rm_file(probe)
            if not readable:
                raise OSError("what was written there does not come back")
        except StorageError as error:
            raise InputError(error.place, error.value, f"{error.reason[:1].upper()}{error.reason[1:]}.") from error
        # A path that no disk takes; a URL that can be read alone.
        except (OSError, ValueError, NotImplementedError) as error:
            raise InputError("storage.root", self.root, f"It cannot be written ({error}); choose another.") from error

    def require_read(self) -> None:
        """Refuse to do a stage while it is not known whether it has been done.

        Raises:
            UnreachableStorageError: the bucket did not say; it is asked again when the stage is tried again.
        """
        if self.unread:
            reason = (
                f"{min(self.unread)} could not be read just now, so it is not known whether this stage has been done"
            )
            raise UnreachableStorageError("storage.root", self.filesystem.unstrip_protocol(self.root), reason)

    @contextlib.contextmanager
    def noting_unread(self, name: str) -> Iterator[None]:
        """Remember, until it is asked for again, what a bucket did not give out.

        Prefect takes every error of a reader for a stage that has not been done.
        """
        try:
            yield
        except StorageError:
            self.unread.add(name)
            raise
        except ValueError:
            self.unread.discard(name)
            raise
        self.unread.discard(name)

    def clear_abandoned(self) -> None:
        """Remove what a killed process left half-written; what a living one is writing is left alone."""
        clear_abandoned(self._incoming())

    def _incoming(self) -> Path:
        """Where processes of this machine write what is not whole yet."""
        return Path(self.path(INCOMING)) if is_local(self.filesystem) else temporary_folder()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A local folder to write an artifact's files into; on the root's own disk where the root is local.

        Raises:
            StorageError: the disk is full or read-only, or it is not known what has been done.
        """
        self.require_read()
        with translate_storage_errors(self.filesystem, self.root), staging_folder(self._incoming()) as parent:
            folder = parent / "files"
            folder.mkdir()
            yield folder

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other process moves artifacts of this run on a local disk; a bucket has no such lock."""
        if not is_local(self.filesystem):
            yield
            return
        with self._alone, contextlib.ExitStack() as stack:
            if not self._depth:
                incoming = Path(self.path(INCOMING))
                incoming.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked_file(incoming / _COMMIT_LOCK))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def set_aside(self, paths: list[str], *, reason: str, kept_names: bool = False) -> None:
        """Move paths of this run out of the way, keeping them and saying why.

        Args:
            paths: files and folders within the run.
            reason: for people.
            staying: they are files, of which copies are kept; whoever asks is about to write over them.
        """
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        self.reasons.append(f"{paths[0]}{others}: {reason}")
        with self.alone(), translate_remote_errors(self.filesystem, self.root):
            taken = self.filesystem.glob(self.path(f"{SET_ASIDE}/*"))
            place = f"{SET_ASIDE}/{len(taken) + 1:04d}-{uuid.uuid4().hex[:6]}"
            self.write_file(f"{place}/reason.json", json.dumps({"reason": reason, "paths": paths}, indent=1).encode())
            for path in paths:
                if kept_names:
                    self.write_file(f"{place}/{path}", self.filesystem.cat_file(self.path(path)))
                else:
                    self._move(self.path(path), self.path(f"{place}/{path}"))

    def _move(self, source: str, target: str) -> None:
        if is_local(self.filesystem):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(source).rename(target)
            return
        for path in sorted(self.filesystem.find(source)):
            # What is missing here, another process has moved first.
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.cp_file(path, target + path[len(source) :])
                self.filesystem.rm_file(path)

    def read_file(self, name: str) -> bytes | None:
        """A small file of the run, or None where there is none."""
        return self._read(self.path(name))

    def read_shared(self, name: str) -> bytes | None:
        """A small file that all runs of the root share, or None where there is none."""
        return self._read(f"{self.root}/{name}")

    def _read(self, path: str) -> bytes | None:
        try:
            with translate_remote_errors(self.filesystem, self.root):
                content: bytes = self.filesystem.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file of the run, whole."""
        self._write(self.path(name), content)

    def write_shared(self, name: str, content: bytes) -> None:
        """Write a small file that all runs of the root share, whole."""
        self._write(f"{self.root}/{name}", content)

    def _write(self, path: str, content: bytes) -> None:
        if is_local(self.filesystem):
            with self.staging() as staged:
                write_whole(self.filesystem, path, content, scratch=staged)
            return
        with translate_remote_errors(self.filesystem, self.root):
            self.filesystem.pipe_file(path, content)
