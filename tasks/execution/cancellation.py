"""Stop the threads that wait for stages on pools, which no signal reaches."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tasks.execution.resources import resource


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
