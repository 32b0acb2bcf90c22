"""One writer at a time: a process locks the run, the rescoring or the evaluation that it writes.

On a local disk the kernel keeps the lock and frees it when the process dies, however it dies. In a bucket it is a
lease.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_core.errors import InputError
from tasks.progress import log
from tasks.storage.artifacts.run_folder import RunFolder
from tasks.storage.files import MAX_SMALL_BYTES, is_local, read_bounded
from tasks.storage.lease import Lease, holder_name, read_holder, take_lease, this_process
from tasks.storage.roots import translate_remote_errors, translate_storage_errors

LOCK = ".lock"
_HELD: set[int] = set()
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def _close_inherited() -> None:
    """Close the files in a forked process, which would keep its parent's locks beyond the parent's death."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_inherited)


class LockLostError(RuntimeError):
    """Another process has taken the lock of this one; the command line ends with exit code 1."""


class FileLock:
    """A locked file; its content is the holder, or nothing. `previous` ended without releasing the lock."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self.previous = read_holder(_content(descriptor))
        if os.fstat(descriptor).st_uid == os.geteuid():
            # Every user who may write in the folder may take the lock after this process.
            os.fchmod(descriptor, path.parent.stat().st_mode & 0o666)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, this_process().model_dump_json(indent=1).encode(), 0)
        _HELD.add(descriptor)

    def find_loss(self) -> str | None:
        """Return why the lock was lost; None while this process has it."""
        if _is_at(self._descriptor, self._path):
            return None
        return "its folder was moved or removed while it was being written"

    def release(self) -> None:
        """Release the lock."""
        os.ftruncate(self._descriptor, 0)
        _HELD.discard(self._descriptor)
        os.close(self._descriptor)


class RunLock:
    """A lock of a run, or of a folder of it, that this process has."""

    def __init__(self, hold: FileLock | Lease, place: str, store: RunFolder) -> None:
        self._place, self._hold, self._store = place, hold, store

    def require_held(self) -> None:
        """Raise LockLostError if another process took the lock, or its file was removed, before anything is written."""
        with translate_remote_errors(self._store.filesystem, self._store.root):
            reason = self._hold.find_loss()
        if reason is not None:
            raise LockLostError(
                f"{self._place} is no longer held by this process: {reason}. This process stops here; complete "
                "artifacts are kept, and the process that has the lock continues from there."
            )


@contextmanager
def locked(store: RunFolder, place: str = "", *, setting: str, value: str) -> Iterator[RunLock]:
    """Lock a place of a run, by default all; a dead holder's lock is taken over, and that is logged.

    InputError names `setting` if another process has the lock, or the file system has none; StorageError if it fails.
    """
    path, shown = store.path(f"{place}/{LOCK}" if place else LOCK), f"{store.run}/{place}".rstrip("/")
    with translate_storage_errors(store.filesystem, store.root), translate_remote_errors(store.filesystem, store.root):
        hold: FileLock | Lease | str
        if is_local(store.filesystem):
            hold = _take_file(Path(path))
        else:
            hold = take_lease(store.filesystem, path, this_process(), on_wait=log)
    if isinstance(hold, str):
        hint = f"It is being written by {hold}. Wait until that ends or stop it there, or choose another name."
        raise InputError(setting, value, hint)
    if hold.previous is not None:
        log(f"{shown}: taken over from {hold.previous}, which ended without releasing it")
    try:
        yield RunLock(hold, shown, store)
    finally:
        hold.release()


def is_locked(store: RunFolder) -> bool:
    """Whether a process that may be alive has the lock of a run; a process of another machine counts as alive."""
    place = store.path(LOCK)
    with contextlib.suppress(FileNotFoundError):
        if not is_local(store.filesystem):
            place = max(store.filesystem.ls(place, detail=False))
        holder = read_holder(read_bounded(store.filesystem, place))
        return holder is not None and not holder.is_gone
    return False


def _take_file(path: Path) -> FileLock | str:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Python closes its descriptors in programs that it starts.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InputError("RUN", str(path), "It is a pipe or a device in the place of a lock. Remove it.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking, the folder may have been moved away.
            if _is_at(descriptor, path):
                return FileLock(descriptor, path)
            os.close(descriptor)
        except BlockingIOError:
            content = _content(descriptor)
            os.close(descriptor)
            return holder_name(read_holder(content))
        except OSError as error:
            os.close(descriptor)
            if error.errno in _WITHOUT_LOCKS:
                hint = "This file system keeps no locks, so two runs could write at once. Mount it with locks, or move."
                raise InputError("storage.root", str(path.parent), hint) from error
            raise


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, min(os.fstat(descriptor).st_size, MAX_SMALL_BYTES), 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
