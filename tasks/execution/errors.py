"""Errors of stages: which of them are retryable, and how they cross processes as JSON.

Errors that people read are rebuilt as the same class with the same arguments. Nothing is unpickled.
"""

import errno
import json
import time
import traceback
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import httpx
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_jsonable_python

from grpo_core.errors import FailedSamplesError, InputError, NonFiniteError
from grpo_core.parity import ParityError, ParityReport, ParityTolerance
from grpo_core.services import ServiceError
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.roots import StorageError, UnreachableStorageError


class Retryable(StrEnum):
    """A kind of retryable error."""

    STORAGE = "storage"
    SERVICE = "service"
    LOST = "lost"
    TIMEOUT = "timeout"


class LostStageError(RuntimeError):
    """The process or worker that ran a stage has died, or cannot be followed."""


class StageTimeoutError(RuntimeError):
    """A stage ran into its timeout and was killed."""


class StageCancelledError(RuntimeError):
    """A stage was cancelled, by the run that requested it or in the server's UI."""


class RetriesExhaustedError(RuntimeError):
    """A shard failed as often as it is retried; retrying the stage would only multiply its attempts."""


class RemoteStageError(RuntimeError):
    """A stage failed in another process, with an error that cannot be rebuilt here; has that process's traceback."""

    def __init__(self, message: str, trace: str, retryable: Retryable | None) -> None:
        self.message, self.trace, self.retryable = message, trace, retryable
        super().__init__(message)

    def __reduce__(self) -> tuple[type["RemoteStageError"], tuple[str, str, Retryable | None]]:
        return type(self), (self.message, self.trace, self.retryable)


# The other codes of a lost connection make a ConnectionError or a TimeoutError. s3fs raises EBUSY for a bucket that
# limits requests or has an internal error.
_TRANSIENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}
_TRANSIENT |= {errno.ESTALE, errno.EBUSY}
# By name: their packages are optional, or take seconds to import. They are classes of aiohttp, botocore and urllib3.
_TRANSIENT_CLIENT_ERRORS = {"ClientConnectionError", "ClientPayloadError", "ConnectTimeoutError"}
_TRANSIENT_CLIENT_ERRORS |= {"EndpointConnectionError", "HTTPClientError", "ReadTimeoutError"}
_SERVER_ERROR = 500
_TOO_MANY_REQUESTS = 429


def retryable_kind(error: BaseException) -> Retryable | None:
    """Return the kind of a retryable error; None for any other."""
    if isinstance(error, RemoteStageError):
        return error.retryable
    if isinstance(error, StorageError):
        return Retryable.STORAGE if isinstance(error, UnreachableStorageError) else None
    if isinstance(error, LostStageError):
        return Retryable.LOST
    if isinstance(error, ServiceError):
        return Retryable.SERVICE
    if isinstance(error, StageTimeoutError):
        return Retryable.TIMEOUT
    # Prefect's own HTTP errors are among them.
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return Retryable.SERVICE if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS else None
    if isinstance(error, httpx.TransportError):
        return Retryable.SERVICE
    if isinstance(error, ConnectionError | TimeoutError):
        return Retryable.STORAGE
    # Before OSError, which some of them are derived from.
    if _TRANSIENT_CLIENT_ERRORS.intersection(kind.__name__ for kind in type(error).__mro__):
        return Retryable.STORAGE
    return Retryable.STORAGE if isinstance(error, OSError) and error.errno in _TRANSIENT else None


class ErrorRecord(BaseModel):
    """An error of one process as JSON for another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str  # name of its class
    arguments: tuple[Any, ...]  # arguments of its class; empty where its class cannot be rebuilt
    message: str
    trace: str  # traceback
    seconds: float  # when it happened, since the epoch
    retryable: Retryable | None = None

    @property
    def is_foreseen(self) -> bool:
        """Whether the error can be rebuilt or is retryable; any other may have left its process unusable."""
        return self.kind in _BUILDERS or self.retryable is not None

    def error(self) -> Exception:
        """Rebuild the error; one that cannot be rebuilt here, or is retryable, becomes a RemoteStageError."""
        if self.kind in _BUILDERS and self.retryable is None:
            return _BUILDERS[self.kind](*self.arguments)
        return RemoteStageError(f"{self.kind}: {self.message}", self.trace, self.retryable)

    def state_message(self) -> str:
        """Return the message of a Prefect state: the error for people, and the record as JSON on the last line."""
        return f"{self.kind}: {self.message}\n{json.dumps(self.model_dump(mode='json'))}"

    @classmethod
    def from_state_message(cls, message: str | None) -> "ErrorRecord | None":
        """Read what `state_message` returned; None for any other message."""
        try:
            return cls.model_validate_json((message or "").rpartition("\n")[2])
        except ValidationError:
            return None


def record_of(error: Exception) -> ErrorRecord:
    """Describe an error that was just caught."""
    # Every subclass of InputError comes back as InputError.
    kind = "InputError" if isinstance(error, InputError) else type(error).__name__
    arguments = error.__reduce__()[1] if kind in _BUILDERS else ()
    return ErrorRecord(
        kind=kind,
        arguments=to_jsonable_python(arguments, fallback=str),
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        seconds=time.time(),
        retryable=retryable_kind(error),
    )


def _parity_error(report: Mapping[str, Any], tolerance: Mapping[str, Any]) -> ParityError:
    lists = {name: tuple(report[name]) for name in ("worst_samples", "worst_differences")}
    return ParityError(ParityReport(**{**report, **lists}), ParityTolerance(**tolerance))


_BUILDERS: Mapping[str, Callable[..., Exception]] = MappingProxyType(
    {
        "FailedSamplesError": FailedSamplesError,
        "InputError": InputError,
        "NonFiniteError": NonFiniteError,
        # A stage that ran out of a device's memory runs again with smaller batches.
        "OutOfMemoryError": torch.OutOfMemoryError,
        "ParityError": _parity_error,
        "StaleReferenceError": StaleReferenceError,
        "StorageError": StorageError,
        "ValueError": ValueError,
    }
)
