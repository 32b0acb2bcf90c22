"""Steps of a write that is complete or absent: staging in a locked folder, fsync, rename, fsync of the folder.

Small JSON documents carry their own checksum.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from grpo_core.errors import InputError

_AT_ONCE = 16
_LOCK, _CHECKSUM = "lock", "checksum"


def is_local(filesystem: AbstractFileSystem) -> bool:
    """Return whether paths of this filesystem are paths of this machine."""
    return isinstance(filesystem, LocalFileSystem)


def matching(filesystem: AbstractFileSystem, folder: str, pattern: str) -> list[str]:
    """List what is in a folder by a pattern of names, sorted; the folder's own characters are no pattern."""
    name, _, below = pattern.partition("/")
    try:
        found = sorted(str(path).rstrip("/") for path in filesystem.ls(folder, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    # A file, and a bucket's marker of a folder, is listed as itself.
    places = [each for each in found if each.startswith(f"{folder}/") and fnmatchcase(each.rsplit("/", 1)[-1], name)]
    return [path for place in places for path in matching(filesystem, place, below)] if below else places


def remove_folder(filesystem: AbstractFileSystem, folder: str) -> None:
    """Delete a folder with all that is in it, if it is there."""
    if not filesystem.exists(folder):
        return
    if is_local(filesystem):
        filesystem.rm(folder, recursive=True)
        return
    # Elsewhere fsspec takes the path of `rm` for a pattern.
    for path in filesystem.find(folder):
        filesystem.rm_file(path)


MAX_SMALL_BYTES = 16 * 2**20  # largest file of a run that is read whole, such as its manifests and metrics
MAX_SOURCE_BYTES = 512 * 2**20  # the same of an image in prompts


class TooLargeError(OSError):
    """A file that should be small is not, or says so of what it unpacks to."""


def read_bounded(filesystem: AbstractFileSystem, path: str, limit: int = MAX_SMALL_BYTES) -> bytes:
    """Read a file of at most `limit` bytes, else TooLargeError; a bucket is asked once, so not for the size first."""
    if not is_local(filesystem):
        content = b""
        try:
            content = filesystem.cat_file(path, start=0, end=limit + 1)
        except OSError as error:
            # An empty file has no such range.
            if error.errno != errno.EINVAL:
                raise
    else:
        with filesystem.open(path, "rb") as stream:
            content = stream.read(limit + 1)
    if len(content) > limit:
        raise TooLargeError(errno.EFBIG, f"it has more than {limit:,} bytes", path)
    return content


def sha256_of(filesystem: AbstractFileSystem, path: str) -> str:
    """Return the hex digest of a file."""
    with filesystem.open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


SETTLED_NS = 10**8  # age of a file from which any change gives it another time: clocks of file systems tick


class FileHashes:
    """The sha256 of files of this machine: each is read once while its inode, size and times stay as they are."""

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._filesystem = filesystem
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}
        self._locks = [threading.Lock() for _ in range(_AT_ONCE)]

    def sha256(self, path: str) -> str:
        """Return the hex digest of a file; of several readers at once only one reads it."""
        with self._locks[hash(path) % _AT_ONCE], self._filesystem.open(path, "rb") as stream:
            now, status = time.time_ns(), os.fstat(stream.fileno())
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == version:
                return known[1]
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            if now - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS:
                self._known[path] = version, found
            return found


def files_below(folder: Path) -> dict[str, Path]:
    """Return every file below a folder by its relative name with forward slashes, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def hashes_of(folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the sha256 of every file below a local folder by its relative name; those that are known are not read."""
    local = LocalFileSystem()
    return {name: known.get(name) or sha256_of(local, str(path)) for name, path in files_below(folder).items()}


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file_atomically(filesystem: AbstractFileSystem, path: str, content: bytes, *, scratch: Path) -> None:
    """Write or replace a small file so that a reader sees all of it or nothing; `scratch` is on the same disk."""
    if not is_local(filesystem):
        filesystem.pipe_file(path, content)
        return
    target, temporary = Path(path), scratch / f"{uuid.uuid4().hex}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content)
    fsync_path(temporary)
    temporary.replace(target)
    fsync_path(target.parent)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def require_writable(folder: Path, place: str) -> None:
    """Raise InputError, which names the option `place`, for a folder of this machine that cannot be made or written."""
    nearest = nearest_existing(folder)
    try:
        # Rights alone do not tell, of a read-only disk or of /proc: this file never has a name.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        hint = f"Nothing can be written in {nearest} ({reason}). Name a folder somewhere else."
        raise InputError(place, str(folder), hint) from error


def fsync_folder(staged: Path, synced: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Force a staged folder to the disk and return its files' sha256; all get its permissions, as runs are shared."""
    # safetensors makes files that only the owner may read.
    rights, paths = staged.stat().st_mode & 0o666, sorted(staged.rglob("*"))
    new = [path for path in paths if path.relative_to(staged).as_posix() not in synced]
    for path in new:
        if path.is_file():
            path.chmod(rights)
    # All at once: a file system's journal commits together what is forced together, and one path after the other waits
    # for as many commits, of several milliseconds each while the disk is busy. Files are hashed while the disk works.
    with ThreadPoolExecutor(min(len(new) + 1, _AT_ONCE), thread_name_prefix="force to disk") as threads:
        forced = threads.map(fsync_path, [*new, staged])
        hashes = hashes_of(staged, synced)
        # Raises what any of them raised.
        for _ in forced:
            pass
    return hashes


def move_folder(staged: Path, target: Path) -> None:
    """Move a synced folder to its place in one rename, which the fsync of the manifest's folder makes last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)


@contextlib.contextmanager
def staging_folder(incoming: Path) -> Iterator[Path]:
    """Make a new folder below `incoming`, locked while it is used and removed afterwards."""
    incoming.mkdir(parents=True, exist_ok=True)
    folder = incoming / uuid.uuid4().hex
    with contextlib.ExitStack() as owner:
        # No process clears while a folder exists that is not locked yet.
        with locked_file(incoming / _LOCK):
            folder.mkdir()
            owner.enter_context(locked_file(folder / _LOCK))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(incoming: Path) -> None:
    """Remove the staging folders whose process is gone; those in use are left alone."""
    if not incoming.is_dir():
        return
    with locked_file(incoming / _LOCK):
        # No staging folder is a link.
        for folder in [path for path in incoming.iterdir() if path.is_dir() and not path.is_symlink()]:
            with contextlib.suppress(BlockingIOError, FileNotFoundError), locked_file(folder / _LOCK, wait=False):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder below TMPDIR for this block; those of killed processes are removed first."""
    clear_abandoned(temporary_folder())
    with staging_folder(temporary_folder()) as parent:
        folder = parent / "files"
        folder.mkdir()
        yield folder


def temporary_folder() -> Path:
    """Return a folder below TMPDIR that only the processes of this user share; InputError if another's is there."""
    folder = Path(tempfile.gettempdir()) / f"grpo-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        hint = f"{folder} is not a folder that this user alone writes; remove it, or set TMPDIR to another place."
        raise InputError("TMPDIR", tempfile.gettempdir(), hint)
    return folder


def link_or_copy(path: Path, target: Path) -> None:
    """Give a file another name in a folder that may be new; a copy on another disk, or on one without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


@contextlib.contextmanager
def locked_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a file for a moment; BlockingIOError if another process has it and `wait` is False."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def dump_checked(described: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON with a `checksum`, the sha256 of everything else; ValueError for NaN and infinity."""
    return _text({**described, _CHECKSUM: _digest(described)})


def load_checked(content: bytes) -> dict[str, Any]:
    """Decode what `dump_checked` encoded; ValueError for any other or changed content."""
    try:
        described = json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(described, dict) or described.pop(_CHECKSUM, None) != _digest(described):
        raise ValueError("it does not match its checksum")
    return described


def _text(described: Mapping[str, Any]) -> bytes:
    return json.dumps(described, indent=1, sort_keys=True, allow_nan=False).encode()


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(described)).hexdigest()
