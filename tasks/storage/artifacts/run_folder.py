"""A run's folder under a storage root: paths, small files, staging, commit lock, `quarantine/`, earlier runs."""

import contextlib
import functools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grpo_core.errors import InputError
from tasks.storage.files import (
    MAX_SMALL_BYTES,
    TooLargeError,
    clear_abandoned,
    is_local,
    locked_file,
    matching,
    read_bounded,
    staging_folder,
    temporary_folder,
    write_file_atomically,
)
from tasks.storage.links import RootFileSystem, SpecialFileError
from tasks.storage.roots import (
    StorageError,
    UnreachableStorageError,
    open_root,
    probe_filesystem,
    require_exclusive_create,
    translate_remote_errors,
    translate_storage_errors,
)

QUARANTINE = "quarantine"  # folder for damaged files, and for results that other results of the same stage replaced
INCOMING = ".incoming"
REASON_FILE = "reason.json"
_COMMIT_LOCK = "commit.lock"


class RunFolder:
    """One run under a storage root that may be any fsspec URL; nothing is written until a method says so.

    A disk or a bucket that fails raises StorageError, a path through a link out of its run LinkError.
    """

    def __init__(self, root: str, run: str) -> None:
        self.filesystem, self.root = open_root(root)
        self.run = run
        self.reasons: list[str] = []  # what was moved to `quarantine/` since this store was opened, and why
        self.copied: dict[str, str] = {}  # the run that made an artifact, by its folder, for those of another run
        self.unread: set[str] = set()  # records and artifacts of finished stages that a bucket failed to return
        self.requested: str | None = None  # file with the request for what is written; its removal withdraws that
        self._given_root = root
        self._is_guarded = isinstance(self.filesystem, RootFileSystem)
        self._threads, self._depth = threading.RLock(), 0
        self._committing: dict[str, threading.RLock] = {}

    @property
    def url(self) -> str:
        """The root with its protocol."""
        url: str = self.filesystem.unstrip_protocol(self.root)
        return url

    def path(self, relative: str = "") -> str:
        """Return the path in the filesystem of a file or folder of this run."""
        return self.path_of(f"{self.run}/{relative}")

    def path_of(self, name: str, *, deleting: bool = False) -> str:
        """Return the path of a file or folder below the root; `deleting` follows no link below a run."""
        path = f"{self.root}/{name}".rstrip("/")
        return self.filesystem.inside(path, deleting=deleting) if self._is_guarded else path

    def refuse_links(self) -> None:
        """Refuse a run with links that lead out of it, before anything else is done with it: InputError names them."""
        if self._is_guarded:
            self.filesystem.refuse_links(self.path())

    def refuse_link(self, path: str) -> None:
        """Refuse a path that leads below the root through a link out of its run; others pass."""
        if self._is_guarded:
            self.filesystem.inside(path)

    def require_writable(self) -> None:
        """Raise InputError unless files of the run can be locked, written, listed, read and removed; in seconds."""
        name = f"{INCOMING}/probe-{uuid.uuid4().hex[:8]}"
        probe = self.path(name)
        try:
            if is_local(self.filesystem):
                self.write_file(name, b"probe")
                self.filesystem.rm_file(probe)
                return
            filesystem = probe_filesystem(self._given_root)
            with translate_remote_errors(filesystem, self.root):
                filesystem.pipe_file(probe, b"probe")
                readable = filesystem.cat_file(probe) == b"probe" and bool(filesystem.ls(probe.rsplit("/", 1)[0]))
                filesystem.rm_file(probe)
                require_exclusive_create(filesystem, probe.rsplit("/", 1)[0])
            if not readable:
                raise OSError("a file that was written there cannot be read back")
        except InputError:
            raise
        except StorageError as error:
            raise InputError(error.place, error.value, f"{error.reason[:1].upper()}{error.reason[1:]}.") from error
        # An impossible path, or a read-only URL.
        except (OSError, ValueError, NotImplementedError) as error:
            raise InputError("storage.root", self.root, f"It cannot be written ({error}); choose another.") from error

    def require_read(self) -> None:
        """Raise UnreachableStorageError while it is not known whether a stage has run."""
        if self.unread:
            reason = f"{min(self.unread)} could not be read, so it is not known whether this stage has run"
            raise UnreachableStorageError("storage.root", self.url, reason)

    @contextlib.contextmanager
    def noting_unread(self, name: str) -> Iterator[None]:
        """Remember what a bucket failed to return, until it is read: Prefect treats every error as a cache miss."""
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
        """Remove the unfinished and temporary files of killed processes; those of living ones are left alone."""
        for folder in {self._incoming(), temporary_folder()}:
            clear_abandoned(folder)

    def _incoming(self) -> Path:
        if not is_local(self.filesystem):
            return temporary_folder()
        return Path(self.path_of(f"{self.run}/{INCOMING}", deleting=True))

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a local folder for an artifact's files; on the root's own disk where the root is local."""
        self.require_read()
        with self._folder_in(self._incoming) as folder:
            yield folder

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder below TMPDIR for copies and intermediate files; a start removes those of killed processes."""
        with self._folder_in(temporary_folder) as folder:
            yield folder

    @contextlib.contextmanager
    def _folder_in(self, parent: Callable[[], Path]) -> Iterator[Path]:
        translated = functools.partial(translate_storage_errors, self.filesystem, self.root)
        # Inside too: the free space is that before the folder is removed.
        with translated(), staging_folder(parent()) as made, translated():
            folder = made / "files"
            folder.mkdir()
            yield folder

    @contextlib.contextmanager
    def commit_lock(self, folder: str | None = None) -> Iterator[None]:
        """Let one process of this machine at a time move artifacts; in a bucket, where content decides, one thread.

        With the `folder` of an artifact, those of a bucket that write others do not wait.
        """
        local = is_local(self.filesystem)
        threads = self._threads if local or folder is None else self._committing.setdefault(folder, threading.RLock())
        with threads, contextlib.ExitStack() as stack:
            if not local:
                yield
                return
            if not self._depth:
                lock = Path(self.path(f"{INCOMING}/{_COMMIT_LOCK}"))
                lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked_file(lock))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def quarantine(self, paths: Sequence[str], *, reason: str) -> None:
        """Move files and folders of this run to `quarantine/`; what is valid there can be restored."""
        with translate_remote_errors(self.filesystem, self.root), self.commit_lock():
            taken = matching(self.filesystem, self.path(QUARANTINE), "*")
            place = f"{QUARANTINE}/{len(taken) + 1:04d}-{uuid.uuid4().hex[:6]}"
            self.reasons.append(f"{place}: {paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {reason}")
            said = json.dumps({"reason": reason, "paths": list(paths)}, indent=1).encode()
            self.write_file(f"{place}/{REASON_FILE}", said)
            for path in paths:
                self._move(self.path(path), self.path(f"{place}/{path}"))

    def earlier_runs(self, run: str | None = None) -> list[str]:
        """List the runs that earlier configurations of this run, or of another one, have become; the last is first."""
        name = run or self.run
        found = (path.rsplit("~", 1)[-1] for path in matching(self.filesystem, self.root, f"{name}~*"))
        return [f"{name}~{number}" for number in sorted((int(each) for each in found if each.isdigit()), reverse=True)]

    def give_to(self, run: str, names: Sequence[str]) -> None:
        """Move files and folders of this run to the same places in another run of the root."""
        with translate_remote_errors(self.filesystem, self.root), self.commit_lock():
            for name in names:
                self._move(self.path(name), self.path_of(f"{run}/{name}"))

    def _move(self, source: str, target: str) -> None:
        if is_local(self.filesystem):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(source).rename(target)
            return
        for path in sorted(self.filesystem.find(source)):
            # Another process may have moved it first.
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.cp_file(path, target + path[len(source) :])
                self.filesystem.rm_file(path)

    def read_file(self, name: str, limit: int = MAX_SMALL_BYTES) -> bytes | None:
        """Read a file of the run; None if there is none, InputError if it has over `limit` bytes or is no file."""
        return self._read(self.path(name), limit)

    def read_shared(self, name: str, limit: int = MAX_SMALL_BYTES) -> bytes | None:
        """Read a file that all runs of the root share; as read_file."""
        return self._read(self.path_of(name), limit)

    def _read(self, path: str, limit: int = MAX_SMALL_BYTES) -> bytes | None:
        try:
            with translate_remote_errors(self.filesystem, self.root):
                return read_bounded(self.filesystem, path, limit)
        except FileNotFoundError:
            return None
        except (SpecialFileError, TooLargeError) as error:
            hint = "No run has written it so. Remove it, or the folder that it is in."
            raise InputError(path, error.strerror, hint) from error

    def write_file(self, name: str, content: bytes, *, shared: bool = False) -> None:
        """Write a small file of the run, or `shared` by all runs of the root, complete or not at all."""
        path = self.path_of(name if shared else f"{self.run}/{name}")
        if is_local(self.filesystem):
            with self.staging() as staged:
                write_file_atomically(self.filesystem, path, content, scratch=staged)
            return
        with translate_remote_errors(self.filesystem, self.root):
            self.filesystem.pipe_file(path, content)
