"""Folders that a running process writes in. The kernel drops a killed one's lock, and its folder is cleared away."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from grpo_core.errors import InputError

_LOCK = "lock"


@contextlib.contextmanager
def staging_folder(incoming: Path) -> Iterator[Path]:
    """A folder of its own below `incoming`, locked as long as it is used and removed afterwards."""
    incoming.mkdir(parents=True, exist_ok=True)
    folder = incoming / uuid.uuid4().hex
    with contextlib.ExitStack() as owner:
        # Nobody clears while there is a folder that is not locked yet.
        with locked_file(incoming / _LOCK):
            folder.mkdir()
            owner.enter_context(locked_file(folder / _LOCK))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(incoming: Path) -> None:
    """Remove the folders whose process is gone; those in use, by this process or another, are left alone."""
    if not incoming.is_dir():
        return
    with locked_file(incoming / _LOCK):
        for folder in [path for path in incoming.iterdir() if path.is_dir()]:
            with contextlib.suppress(BlockingIOError, FileNotFoundError), locked_file(folder / _LOCK, wait=False):
                shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    """A folder below TMPDIR that all processes of this user share, and nobody else.

    Raises:
        InputError: something else stands there, perhaps another user's.
    """
    folder = Path(tempfile.gettempdir()) / f"grpo-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        hint = f"{folder} is not a folder that this user alone writes; remove it, or set TMPDIR to another place."
        raise InputError("TMPDIR", tempfile.gettempdir(), hint)
    return folder


@contextlib.contextmanager
def locked_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file for a moment; a killed holder's is free again.

    Raises:
        BlockingIOError: another holds it, and this one is not to wait.
    """
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
