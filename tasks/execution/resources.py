"""What a run keeps from one stage to the next: the loaded policy, child processes, device memory, stop signals.

`run_resources()` opens the collection, and `resource(Kind)` returns the one object of a kind, created on first use.
Stop signals end the threads that wait for stages on pools, which no signal of the operating system reaches.
"""

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import TypeVar

import torch

from grpo_core.errors import InputError
from tasks.progress import log

R = TypeVar("R")


class _FittingSizes(dict[tuple[str, str, int], int]):
    """Batch sizes that fit after a larger one had failed, by run, setting and configured size."""


def halve_on_out_of_memory(title: str, run: str, setting: str, size: int, call: Callable[[int], R]) -> R:
    """Call a function with a batch size, and once more with half of it if the device's memory is too small.

    The half is remembered: the run's later calls for the same setting begin with it. No result is keyed by it.

    Args:
        title: title of the stage, for messages.
        run: name of the run.
        setting: key of the configuration that gives the size.
        size: samples or prompts per batch, as configured.
        call: does all of the work; must have no effect when it raises.

    Raises:
        InputError: half of the size is too much as well, or the size is 1.
    """
    fitting, key = resource(_FittingSizes), (run, setting, size)
    current = fitting.get(key, size)
    smallest = max(1, current // 2)
    while True:
        try:
            return call(current)
        except torch.OutOfMemoryError as error:
            message = str(error).partition(". ")[0]
            if current == smallest:
                hint = (
                    f"The device's memory is too small for it ({message}). Lower it, the image or completion size, or "
                    "the group size; or turn on policy.gradient_checkpointing if an update fails."
                )
                raise InputError(setting, current, hint) from error
        # Outside of the except clause, since the error keeps frames and their tensors alive.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        fitting[key] = smallest
        log(f"{title}: {message}; running it again, and later ones, with {setting} {smallest} instead of {current}")
        current = smallest


def reset_peak_memory() -> None:
    """Begin to measure; of stages that run at the same time in one process, each may report what another took."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int | None:
    """Return the most bytes that were allocated on the current GPU since the reset; None if it was not used."""
    return torch.cuda.max_memory_allocated() or None if torch.cuda.is_initialized() else None


_AFTER_IMPORT = 0.05
"""Seconds after which a signal that came while the import lock was held is sent again."""


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
            if (close := getattr(each, "close", None)) is not None:
                close()


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
    """Cancel every stage that is waited for at the first SIGINT, and let no signal's exception end an import.

    asyncio raises nothing at the first SIGINT: it cancels a coroutine, which may be waiting for a stage. Prefect's
    handler of SIGTERM raises at once; in the middle of an import that would leave Python's import lock taken, and
    every other thread would wait for it for ever.

    Raises:
        KeyboardInterrupt: SIGINT came, and then the run was cancelled or something failed: a terminal sends it to the
            whole group of processes, so the temporary server or a child may have ended first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop, interrupts = resource(StopSignals), list[int]()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            stop.cancelled.set()
            interrupts.append(number)
        if _holds_import_lock(frame):
            threading.Timer(_AFTER_IMPORT, os.kill, (os.getpid(), number)).start()
        elif callable(handler := previous[signal.Signals(number)]):
            handler(number, frame)

    changed = [number for number, handler in previous.items() if callable(handler)]
    for number in changed:
        signal.signal(number, handle)
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in changed:
            signal.signal(number, previous[number])


def _holds_import_lock(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap"
