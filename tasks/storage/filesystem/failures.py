"""Storage that fails: one message with the place, what was found and the hint."""

import contextlib
import errno
import re
import shutil
import tempfile
from collections.abc import Iterator

from fsspec import AbstractFileSystem
from safetensors import SafetensorError

from tasks.storage.filesystem.files import is_local

_TOLD = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk reports an error",
}
# What s3fs makes of a bucket's own errors, of one that asks for fewer requests, and of a connection's.
_PASSING = frozenset({errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT})
# By name: the clients of buckets are optional packages.
_NO_ANSWER = frozenset(
    {"ConnectionError", "HTTPClientError", "ClientConnectionError", "ClientPayloadError", "ClientResponseError"}
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"})
CREDENTIALS = (
    "Give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in a profile (AWS_PROFILE), and "
    "the address of a bucket that is not Amazon's in AWS_ENDPOINT_URL"
)


class StorageError(RuntimeError):
    """An artifact cannot be written or read; the command line ends with exit code 1.

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


class UnreachableStorageError(StorageError, ConnectionError):
    """A bucket does not answer, or says that it is busy: it may pass by itself."""


@contextlib.contextmanager
def translate_storage_errors(filesystem: AbstractFileSystem, root: str) -> Iterator[None]:
    """Turn the failures of a disk that is written to into StorageError; every other error passes as it is.

    Raises:
        StorageError: the disk is full, read-only or broken.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _errno(error)
        if isinstance(error, StorageError) or number not in _TOLD:
            raise
        # What goes to a bucket is written to a disk of this machine first.
        place, folder = ("storage.root", root) if is_local(filesystem) else ("TMPDIR", tempfile.gettempdir())
        free = f" ({shutil.disk_usage(folder).free / 2**20:.1f} MiB free)"
        raise StorageError(place, folder, _TOLD[number] + free) from error


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors writes in Rust and tells the number in its text alone.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def translate_remote_errors(filesystem: AbstractFileSystem, root: str) -> Iterator[None]:
    """Turn the failures of a bucket into StorageError; what is only missing there passes as it is.

    Raises:
        UnreachableStorageError: it does not answer, or is busy.
        StorageError: it is not there, or refuses.
    """
    if is_local(filesystem):
        yield
        return
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError):
            raise
        told = _of_bucket(error)
        if told is None:
            raise
        kind, reason = told
        raise kind("storage.root", filesystem.unstrip_protocol(root), reason) from error


def _of_bucket(error: Exception) -> tuple[type[StorageError], str] | None:
    names = {kind.__name__ for kind in type(error).__mro__}
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if _code(error) == "NoSuchBucket":
        return StorageError, "there is no such bucket; make it, or set storage.root to one that is there"
    # An error of this machine's disks names the file; it is none of the bucket's.
    own = isinstance(error, OSError) and error.filename is not None
    if own:
        return None
    if isinstance(error, PermissionError):
        return StorageError, (
            f"the bucket refuses ({message}); it takes keys that may list, read, write and delete objects there. "
            f"{CREDENTIALS}"
        )
    if names & _NO_CREDENTIALS:
        return StorageError, f"no credentials were found ({message}). {CREDENTIALS}"
    passing = isinstance(error, OSError) and error.errno in _PASSING
    if passing or isinstance(error, ConnectionError | TimeoutError) or names & _NO_ANSWER:
        return UnreachableStorageError, f"the bucket does not answer as it should ({message}); look at AWS_ENDPOINT_URL"
    return None


def _code(error: Exception) -> str | None:
    """What the service calls the error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def is_conflict(error: OSError) -> bool:
    """Whether a conditional write lost against another that is under way."""
    return isinstance(error, FileExistsError) or _code(error) == "ConditionalRequestConflict"
