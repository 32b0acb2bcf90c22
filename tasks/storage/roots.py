"""The root of all runs, a folder or any URL that fsspec reads, and its failures as one clear error."""

import contextlib
import errno
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import SafetensorError

from grpo_core.errors import InputError, refuse_secrets
from tasks.storage.files import is_local, nearest_existing
from tasks.storage.links import RootFileSystem

_S3 = ("s3://", "s3a://")
LOOK = {"connect_timeout": 4, "read_timeout": 6}  # timeout in seconds of the check before a run begins
# A bucket that does not answer is reported within about a minute; the stage is then retried by placement.retries.
_ATTEMPTS = {"mode": "standard", "total_max_attempts": 3}


def open_root(root: str) -> tuple[AbstractFileSystem, str]:
    """Open a root's filesystem and its path there; InputError for one that cannot be opened, or a file there."""
    refuse_secrets("storage.root", root)
    place = root if "://" in root else str(Path(root).expanduser())
    try:
        options = _s3_options({"retries": _ATTEMPTS}) if root.startswith(_S3) else {}
        filesystem, path = fsspec.core.url_to_fs(place, **options)
    except ImportError as error:
        package = "s3fs, which the extra s3 of this package brings" if root.startswith(_S3) else "what reads such URLs"
        raise InputError("storage.root", root, f"{error}. Install {package}.") from error
    except (OSError, ValueError) as error:
        hint = f"{error}. Give a folder or a URL of a known kind, such as s3://, and install what reads it."
        raise InputError("storage.root", root, hint) from error
    if is_local(filesystem) and not (nearest := nearest_existing(Path(path))).is_dir():
        raise InputError("storage.root", root, f"{nearest} is a file. Name a folder, which is made if it is not there.")
    path = path.rstrip("/")
    return (RootFileSystem(path) if is_local(filesystem) else filesystem), path


def probe_filesystem(root: str) -> AbstractFileSystem:
    """Open the filesystem with short timeouts, for the check before a run begins."""
    if not root.startswith(_S3):
        return open_root(root)[0]
    config = {**LOOK, "retries": {"mode": "standard", "total_max_attempts": 2}}
    filesystem: AbstractFileSystem = fsspec.filesystem("s3", skip_instance_cache=True, **_s3_options(config))
    filesystem.retries = 1
    return filesystem


def require_exclusive_create(filesystem: AbstractFileSystem, folder: str) -> None:
    """Raise InputError for a filesystem of which two processes may both create one file, and so both write one run.

    Many only look whether there is such a file before they write it. Here they look and see none, as in a race. A
    file is created in `folder` for it, and removed.
    """
    # A filesystem in memory has no other process.
    if isinstance(filesystem, MemoryFileSystem) or filesystem in _EXCLUSIVE:
        return
    path = f"{folder}/probe-{uuid.uuid4().hex[:8]}"
    filesystem.pipe_file(path, b"first")
    try:
        _blind(filesystem).pipe_file(path, b"second", mode="create")
    except OSError as error:
        if not is_conflict(error):
            raise
        _EXCLUSIVE.add(filesystem)
        return
    finally:
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(path)
    hint = "Two starts could write one run there: name a folder, or a bucket with conditional writes, such as s3://."
    raise InputError("storage.root", filesystem.unstrip_protocol(folder), hint)


_EXCLUSIVE: "weakref.WeakSet[AbstractFileSystem]" = weakref.WeakSet()


def _blind(filesystem: AbstractFileSystem) -> AbstractFileSystem:
    """Copy a filesystem, with those that it wraps; the copy says of every file that there is none."""

    async def never(*arguments: object, **options: object) -> bool:
        return False

    def inner(value: object) -> object:
        return _blind(value) if isinstance(value, AbstractFileSystem) else value

    kind = type(filesystem)
    # Of a class of its own, since those that cache take no method from an instance.
    blind = type(kind.__name__, (kind,), {"exists": lambda *arguments, **options: False, "_exists": never})
    options = {name: inner(value) for name, value in filesystem.storage_options.items()}
    copied: AbstractFileSystem = blind(*map(inner, filesystem.storage_args), **{**options, "skip_instance_cache": True})
    return copied


def _s3_options(config: dict[str, Any]) -> dict[str, Any]:
    # Other machines write here too, so listings must not be cached.
    return {"use_listings_cache": False, "config_kwargs": config, "session": _s3_session()}


@lru_cache(maxsize=1)
def _s3_session() -> Any:
    """Make a session whose uploads send no Expect header: aiohttp would wait without end for the answer to it."""
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    session = AioSession()
    session.unregister("before-call.s3", add_expect_header)
    return session


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk reports an error",
}
# s3fs raises these for internal errors of a bucket, limited requests and lost connections.
_PASSING = frozenset({errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT})
# By name, since the clients of buckets are optional packages.
_NO_ANSWER = frozenset(
    {"ConnectionError", "HTTPClientError", "ClientConnectionError", "ClientPayloadError", "ClientResponseError"}
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"})
CREDENTIALS = (
    "Give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in a profile (AWS_PROFILE), and "
    "the address of a bucket that is not Amazon's in AWS_ENDPOINT_URL"
)


class StorageError(RuntimeError):
    """An artifact cannot be written or read where a setting names it; the command line ends with exit code 1."""

    def __init__(self, place: str, value: str, reason: str) -> None:
        self.place, self.value, self.reason = place, value, reason
        super().__init__(
            f"{place}: got {value!r}, where {reason}. Everything written before is complete. Fix this and start "
            "again with the same command: only the stage that was being written runs again."
        )

    def __reduce__(self) -> tuple[type["StorageError"], tuple[str, str, str]]:
        return type(self), (self.place, self.value, self.reason)


class UnreachableStorageError(StorageError, ConnectionError):
    """A bucket does not answer or is busy; a retry may succeed."""


@contextlib.contextmanager
def translate_storage_errors(filesystem: AbstractFileSystem, root: str) -> Iterator[None]:
    """Turn the errors of a full, read-only or broken disk into StorageError; others pass unchanged."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _errno(error)
        if isinstance(error, StorageError) or number not in _REASONS:
            raise
        place, folder = _failed_folder(error, root if is_local(filesystem) else None)
        free = f" ({_free(folder) / 2**20:.1f} MiB free)"
        raise StorageError(place, folder, _REASONS[number] + free) from error


def _failed_folder(error: OSError | SafetensorError, root: str | None) -> tuple[str, str]:
    """Return the setting and the folder of the disk that an error is of: the root's, or that of temporary files."""
    temporary = tempfile.gettempdir()
    if root is None:
        # Files for a bucket are written to a disk of this machine first.
        return "TMPDIR", temporary
    named = getattr(error, "filename", None)
    if isinstance(named, str):
        below = [folder for folder in (root, temporary) if Path(named).is_relative_to(folder)]
        fuller = max(below, key=len) if below else root
    else:
        # A file that is open has no name in the error. Of one disk it is the root.
        fuller = min((root, temporary), key=_free)
    return ("storage.root", root) if fuller == root else ("TMPDIR", temporary)


def _free(folder: str) -> int:
    return shutil.disk_usage(nearest_existing(Path(folder))).free


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors writes in Rust and reports the number only in its message.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def translate_remote_errors(filesystem: AbstractFileSystem, root: str) -> Iterator[None]:
    """Turn failures of a bucket into StorageError, or UnreachableStorageError; missing files pass unchanged."""
    if is_local(filesystem):
        yield
        return
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError):
            raise
        failure = _of_bucket(error)
        if failure is None:
            raise
        kind, reason = failure
        raise kind("storage.root", filesystem.unstrip_protocol(root), reason) from error


def _of_bucket(error: Exception) -> tuple[type[StorageError], str] | None:
    names = {kind.__name__ for kind in type(error).__mro__}
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if _code(error) == "NoSuchBucket":
        return StorageError, "there is no such bucket; create it, or set storage.root to an existing one"
    # An error of this machine's disks names the file; it is no failure of the bucket.
    if isinstance(error, OSError) and error.filename is not None:
        return None
    if isinstance(error, PermissionError):
        return StorageError, (
            f"the bucket refuses access ({message}); the keys must allow to list, read, write and delete objects. "
            f"{CREDENTIALS}"
        )
    if names & _NO_CREDENTIALS:
        return StorageError, f"no credentials were found ({message}). {CREDENTIALS}"
    passing = isinstance(error, OSError) and error.errno in _PASSING
    if passing or isinstance(error, ConnectionError | TimeoutError) or names & _NO_ANSWER:
        return UnreachableStorageError, f"the bucket does not answer as it should ({message}); look at AWS_ENDPOINT_URL"
    return None


def _code(error: Exception) -> str | None:
    """Return the service's code of the error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def is_conflict(error: OSError) -> bool:
    """Return whether a conditional write lost against a concurrent one."""
    return isinstance(error, FileExistsError) or _code(error) == "ConditionalRequestConflict"
