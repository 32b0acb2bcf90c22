"""Which errors may pass by themselves. Wrong input, NaN and a full disk never do, and are never tried again."""

import errno
from collections import Counter, defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Any
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.schemas import State, TaskRun
from prefect.exceptions import PrefectHTTPStatusError

from configs.placement_sections import PlacementSection, RetrySection
from tasks.progress import log
from tasks.storage.filesystem.failures import StorageError, UnreachableStorageError


class Fault(StrEnum):
    """A kind of error that may pass by itself; its value is its field of RetrySection."""

    STORAGE = "storage"
    SERVICE = "service"
    LOST = "lost"
    TIMEOUT = "timeout"


class LostStageError(RuntimeError):
    """The process or worker that did a stage is gone, or its work can no longer be followed."""


class StageTimeoutError(RuntimeError):
    """A stage was over its time and has been ended."""


class StageCancelledError(RuntimeError):
    """A stage was cancelled: by whoever asked for it, or in the server's UI."""


class TriesUsedUpError(RuntimeError):
    """A part of a stage failed as often as its fault is tried; the whole would only multiply its tries."""


class RemoteStageError(RuntimeError):
    """A stage failed elsewhere, with an error that cannot be rebuilt here.

    Args:
        message: for people, the kind of error first.
        trace: where it happened.
        fault: its kind, if it may pass by itself.
    """

    def __init__(self, message: str, trace: str, fault: Fault | None) -> None:
        self.message, self.trace, self.fault = message, trace, fault
        super().__init__(message)

    def __reduce__(self) -> tuple[type["RemoteStageError"], tuple[str, str, Fault | None]]:
        return type(self), (self.message, self.trace, self.fault)


_PASSING = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ESTALE,
        errno.ETIMEDOUT,
        # What s3fs makes of a bucket that asks for fewer requests, or has an error of its own.
        errno.EBUSY,
    }
)
# By name: their packages are optional, or take seconds to import.
_OF_CLIENTS = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "HTTPClientError",
        "ReadTimeoutError",
        "ServerTimeoutError",
    }
)
_SERVER_SIDE = 500
_TOO_MANY_REQUESTS = 429
_DELAYS = 50


def fault_of(error: BaseException) -> Fault | None:
    """The kind of a fault that may pass by itself; None for every error that would come again."""
    if isinstance(error, RemoteStageError):
        return error.fault
    if isinstance(error, StorageError):
        return Fault.STORAGE if isinstance(error, UnreachableStorageError) else None
    if isinstance(error, LostStageError):
        return Fault.LOST
    if isinstance(error, StageTimeoutError):
        return Fault.TIMEOUT
    if isinstance(error, PrefectHTTPStatusError | httpx.HTTPStatusError):
        status = error.response.status_code
        return Fault.SERVICE if status >= _SERVER_SIDE or status == _TOO_MANY_REQUESTS else None
    if isinstance(error, httpx.TransportError):
        return Fault.SERVICE
    if isinstance(error, ConnectionError | TimeoutError):
        return Fault.STORAGE
    # Before OSError, from which some of them are derived.
    if _OF_CLIENTS.intersection(kind.__name__ for kind in type(error).__mro__):
        return Fault.STORAGE
    return Fault.STORAGE if isinstance(error, OSError) and error.errno in _PASSING else None


def retry_options(placement: PlacementSection) -> dict[str, Any]:
    """Options of a Prefect task that is tried again, with delays that double and are spread at random."""
    limits = placement.retries
    # Prefect's own count is of all kinds together; the condition counts each by itself.
    most = sum(limits_of(limits).values())
    if not most:
        return {"retries": 0}
    # Prefect takes so many delays at most, and the last of them for every later try.
    delays = [min(limits.max_delay, limits.delay * 2**number) for number in range(min(most, _DELAYS))]
    return {
        "retries": most,
        "retry_delay_seconds": delays,
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": _condition(limits),
    }


def limits_of(limits: RetrySection) -> dict[Fault, int]:
    """How often each kind is tried again."""
    return {fault: int(getattr(limits, fault.value)) for fault in Fault}


def _condition(limits: RetrySection) -> Callable[[Task[..., Any], TaskRun, State], bool]:
    tries = limits_of(limits)
    # One task may be run several times, and side by side.
    met: defaultdict[UUID, Counter[Fault]] = defaultdict(Counter)

    # A plain function: Prefect takes any other callable for one that says no.
    def passes_by_itself(task: Task[..., Any], task_run: TaskRun, state: State) -> bool:
        error = state.data
        fault = fault_of(error) if isinstance(error, BaseException) else None
        if fault is None:
            return False
        faults = met[task_run.id]
        left = tries[fault] - faults[fault]
        if left == 0:
            return False
        faults[fault] += 1
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        # So many if none but this kind comes from here on.
        number = faults.total()
        log(f"{task_run.name}: {first_line}; try {number + 1} of {number + left} follows")
        return True

    return passes_by_itself
