"""Storage that can take no more: one message with the place, what was found and the mend."""

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator

from fsspec import AbstractFileSystem
from safetensors import SafetensorError

from tasks.storage.files import is_local

_TOLD = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk reports an error",
}


class StorageError(RuntimeError):
    """An artifact cannot be written; the command line ends with exit code 1.

    Args:
        place: the setting that says where.
        value: what it says.
        reason: what is wrong there.
    """

    def __init__(self, place: str, value: str, reason: str) -> None:
        self.place, self.value, self.reason = place, value, reason
        super().__init__(
            f"{place}: got {value!r}, where {reason}. What was written before is whole and kept. Mend it and start "
            "again with the same command: only the stage that was being written is done again."
        )

    def __reduce__(self) -> tuple[type["StorageError"], tuple[str, str, str]]:
        return type(self), (self.place, self.value, self.reason)


@contextlib.contextmanager
def storage_failures_told(filesystem: AbstractFileSystem, root: str) -> Iterator[None]:
    """Turn the failures of a disk into StorageError; every other error passes as it is.

    Raises:
        StorageError: the disk is full, read-only or broken.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _errno(error)
        if number not in _TOLD:
            raise
        raise StorageError("storage.root", root, _TOLD[number] + _free(filesystem, root)) from error


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors writes in Rust and tells the number in its text alone.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _free(filesystem: AbstractFileSystem, root: str) -> str:
    if not is_local(filesystem):
        return ""
    return f" ({shutil.disk_usage(root).free / 2**20:.1f} MiB free)"
