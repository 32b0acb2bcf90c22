"""What a run keeps between stages: one object per kind and run, closed at the end, seen by the run's threads."""

import _imp
import asyncio
import contextvars
import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tasks.execution.resources import resource, run_resources, stages_cancelled_on_signal


class Kept:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_one_object_per_run_closed_with_it() -> None:
    with run_resources():
        first = resource(Kept)
        assert resource(Kept) is first
        with run_resources():
            inner = resource(Kept)
            assert inner is not first
        assert (inner.closed, first.closed) == (True, False)
        assert resource(Kept) is first
    assert first.closed


def test_threads_that_copy_the_context_share_it() -> None:
    found: list[Kept] = []
    with run_resources():
        for _ in range(4):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(lambda: found.append(resource(Kept)),))
            thread.start()
            thread.join()
        assert found == [resource(Kept)] * 4


class StoppedError(Exception):
    pass


def _stop(number: int, frame: object) -> None:
    raise StoppedError


@pytest.fixture
def stopped_by_sigterm() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, _stop)
    yield
    signal.signal(signal.SIGTERM, previous)


def _signal_while_main_waits_to_import() -> None:
    _imp.acquire_lock()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    _imp.release_lock()


def _import_and_wait() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    time.sleep(5)


@pytest.mark.usefixtures("stopped_by_sigterm")
def test_a_signal_during_an_import_leaves_the_import_lock_free() -> None:
    other = threading.Thread(target=_signal_while_main_waits_to_import)
    with run_resources(), stages_cancelled_on_signal():
        other.start()
        time.sleep(0.1)
        with pytest.raises(StoppedError):
            _import_and_wait()
    other.join()
    assert not _imp.lock_held()


def _answer(number: int, frame: object) -> None:
    """As asyncio at the first SIGINT: nothing is raised."""


def _signal_and_fail(number: int, error: type[BaseException]) -> None:
    os.kill(os.getpid(), number)
    raise error


@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError])
def test_what_fails_after_an_interrupt_is_the_interrupt(error: type[BaseException]) -> None:
    previous = signal.signal(signal.SIGINT, _answer)
    try:
        for number, seen in ((0, error), (signal.SIGINT, KeyboardInterrupt)):
            with run_resources(), pytest.raises(seen), stages_cancelled_on_signal():
                _signal_and_fail(number, error)
    finally:
        signal.signal(signal.SIGINT, previous)
