"""A lock on a local disk: held through the kernel, which drops it when the process dies, however it dies."""

import errno
import fcntl
import os
from pathlib import Path

from grpo_core.errors import InputError
from tasks.storage.locks.lock_holder import Holder, described_holder

_HELD: set[int] = set()
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def _close_inherited() -> None:
    """A forked process shares its parent's open file, and would keep the lock beyond the parent's death."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_inherited)


class FileLock:
    """One hold of a lock file; its content says who holds it, and is empty while nobody does.

    Attributes:
        previous: the holder that ended without releasing it, if the one before did.
    """

    def __init__(self, descriptor: int, path: Path, previous: Holder | None) -> None:
        self.previous = previous
        self._descriptor, self._path = descriptor, path

    def find_loss(self) -> str | None:
        """Why the lock is no longer held; None while it is."""
        if _is_at(self._descriptor, self._path):
            return None
        return "its folder was moved or removed while it was being written"

    def release(self) -> None:
        """Let others take it; afterwards the file names nobody."""
        os.ftruncate(self._descriptor, 0)
        _HELD.discard(self._descriptor)
        os.close(self._descriptor)


def take_file(path: Path, holder: Holder) -> FileLock | str:
    """Take the lock, or tell who holds it.

    Args:
        path: the lock's file; its folder is made where it is missing.
        holder: this process.

    Raises:
        InputError: the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Python's descriptors are closed in the programs that this one starts.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.close(descriptor)
            return str(described_holder(content) or "another process, which has not said who it is")
        except OSError as error:
            os.close(descriptor)
            if error.errno in _WITHOUT_LOCKS:
                hint = "This file system keeps no locks, so two runs could write at once. Mount it with locks, or move."
                raise InputError("storage.root", str(path.parent), hint) from error
            raise
        # Between the opening and the locking, the folder may have been moved away.
        if _is_at(descriptor, path):
            return _describe(descriptor, path, holder)
        os.close(descriptor)


def _describe(descriptor: int, path: Path, holder: Holder) -> FileLock:
    try:
        previous = described_holder(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        _share(descriptor, path.parent)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.model_dump_json(indent=1).encode(), 0)
    except OSError:
        os.close(descriptor)
        raise
    _HELD.add(descriptor)
    return FileLock(descriptor, path, previous)


def _share(descriptor: int, folder: Path) -> None:
    """Whoever may write in the folder may take the lock after this process."""
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, folder.stat().st_mode & 0o666)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
