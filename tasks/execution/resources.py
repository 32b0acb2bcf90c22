"""What a run keeps from one stage to the next: the loaded policy, child processes, and the signals that stop it.

`run_resources()` opens the collection, and `resource(Kind)` returns the one object of a kind, created on first use.
Stop signals end the threads that wait for stages on pools, which no signal of the operating system reaches.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Closable(Protocol):
    """A resource that must be closed when its run ends."""

    def close(self) -> None:
        """Release the resource."""


R = TypeVar("R")


class _Resources:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[type, object] = {}

    def get(self, kind: type[R]) -> R:
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()
            found = self._objects[kind]
        assert isinstance(found, kind)
        return found

    def close(self) -> None:
        for each in list(self._objects.values()):
            if isinstance(each, Closable):
                each.close()


_CURRENT: ContextVar[_Resources | None] = ContextVar("run_resources", default=None)


@contextlib.contextmanager
def run_resources() -> Iterator[None]:
    """Open a collection for this context, and for the threads and tasks that copy it; close it at the end."""
    token = _CURRENT.set(resources := _Resources())
    try:
        yield
    finally:
        resources.close()
        _CURRENT.reset(token)


def resource(kind: type[R]) -> R:
    """Return the current run's object of a class that is built without arguments.

    Outside of `run_resources` the object belongs to the calling context; child processes end with this process anyway.
    """
    resources = _CURRENT.get()
    if resources is None:
        _CURRENT.set(resources := _Resources())
    return resources.get(kind)


class StopSignals:
    """Events that the waiting threads of a run check.

    Attributes:
        cancelled: the run was interrupted; every stage that is waited for is cancelled.
        failed: a stage of the run failed; stages that no worker has taken yet are withdrawn.
    """

    def __init__(self) -> None:
        self.cancelled, self.failed = threading.Event(), threading.Event()


@contextlib.contextmanager
def stages_withdrawn_on_failure() -> Iterator[None]:
    """Withdraw every stage that no worker has taken yet when the run fails, so that the failure is reported at once.

    A stage that a worker has begun is waited for: its result is kept for the next start.
    """
    try:
        yield
    except Exception:
        resource(StopSignals).failed.set()
        raise


@contextlib.contextmanager
def stages_cancelled_on_interrupt() -> Iterator[None]:
    """Cancel every stage that is waited for when the run is stopped: shards, rewards, prefetched rollouts."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            resource(StopSignals).cancelled.set()
        raise


@contextlib.contextmanager
def stages_cancelled_on_signal() -> Iterator[None]:
    """Cancel every stage that is waited for at the first SIGINT.

    asyncio raises nothing at the first one: it cancels a coroutine, which may be waiting for a stage.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    stop = resource(StopSignals)

    def cancel(number: int, frame: FrameType | None) -> None:
        stop.cancelled.set()
        previous(number, frame)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
