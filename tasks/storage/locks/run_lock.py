"""One writer at a time: a run, a rescoring or an evaluation is held by the process that writes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from grpo_core.errors import InputError
from tasks.progress import log
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.failures import translate_remote_errors, translate_storage_errors
from tasks.storage.filesystem.files import is_local
from tasks.storage.locks.file_lock import FileLock, take_file
from tasks.storage.locks.lease import Lease, take_lease
from tasks.storage.locks.lock_holder import this_process

LOCK = ".lock"


class LockLostError(RuntimeError):
    """Another process writes what this one was writing; the command line ends with exit code 1."""


class RunLock:
    """A hold of a place in a run.

    Attributes:
        place: in words, for people.
    """

    def __init__(self, hold: FileLock | Lease, place: str, store: ArtifactStore) -> None:
        self.place, self._hold, self._store = place, hold, store

    def require_held(self) -> None:
        """Refuse to write on after the hold was lost.

        Raises:
            LockLostError: another process took it, or its file was removed.
            StorageError: a bucket does not say.
        """
        with translate_remote_errors(self._store.filesystem, self._store.root):
            reason = self._hold.find_loss()
        if reason is not None:
            raise LockLostError(
                f"{self.place} is no longer held by this process: {reason}. This process stops here; what is "
                "whole is kept, and whoever holds it goes on from there."
            )


@contextmanager
def locked(store: ArtifactStore, place: str = "", *, setting: str, value: str) -> Iterator[RunLock]:
    """Hold a place of a run; one whose holder died is taken over, and people are told.

    Args:
        store: the run.
        place: folder within the run; by default all of it.
        setting: that names the place, as the person would find it.
        value: what it says.

    Raises:
        InputError: another process holds it.
        StorageError: it cannot be written there.
    """
    path, shown = store.path(f"{place}/{LOCK}" if place else LOCK), f"{store.run}/{place}".rstrip("/")
    with translate_storage_errors(store.filesystem, store.root), translate_remote_errors(store.filesystem, store.root):
        if is_local(store.filesystem):
            hold: FileLock | Lease | str = take_file(Path(path), this_process())
        else:
            hold = take_lease(store.filesystem, path, this_process())
    if isinstance(hold, str):
        hint = f"It is being written by {hold}. Wait until that ends or stop it there, or choose another name."
        raise InputError(setting, value, hint)
    if hold.previous is not None:
        log(f"{shown}: taken over from {hold.previous}, which ended without releasing it")
    try:
        yield RunLock(hold, shown, store)
    finally:
        hold.release()


_CURRENT: ContextVar[RunLock] = ContextVar("run_lock")


def use_lock(lock: RunLock) -> None:
    """Make this the hold that stages of the present context need."""
    _CURRENT.set(lock)


def current_lock() -> RunLock:
    """The hold of the present context."""
    return _CURRENT.get()
