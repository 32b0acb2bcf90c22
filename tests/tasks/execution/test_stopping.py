"""What a signal does to a run: real signals to this process, whose main thread runs the stages."""

import _imp
import asyncio
import contextvars
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tasks.execution import stopping
from tasks.execution.errors import StageCancelledError
from tasks.execution.resources import resource, run_resources
from tasks.execution.stopping import (
    Cancellable,
    StopSignals,
    signals_raise,
    stages_cancelled_on_interrupt,
    stopping_after_stage,
)
from tasks.progress import Silence, listen
from tests.processes import ProgressLog

STAGE = "iteration 3: update policy"


class TerminatedError(BaseException):
    pass


def _terminated(number: int, frame: object) -> None:
    raise TerminatedError


ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: TerminatedError}


@pytest.fixture(autouse=True)
def handler_of_sigterm() -> Iterator[None]:
    """As Prefect's, which raises."""
    previous = signal.signal(signal.SIGTERM, _terminated)
    yield
    signal.signal(signal.SIGTERM, previous)


def _until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.005)


def _send(number: int) -> None:
    """From the kernel to the main thread, as a terminal does."""
    os.kill(os.getpid(), number)


def _send_and_wait(number: int) -> None:
    """Wait for a lock afterwards, as for a stage in a thread."""
    _send(number)
    threading.Event().wait(60)


def _in_context(body: Callable[[ProgressLog], None]) -> ProgressLog:
    heard = ProgressLog()

    def run() -> None:
        listen(heard)
        with run_resources():
            body(heard)

    contextvars.copy_context().run(run)
    return heard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_running_stage_is_finished_and_no_other_begins(number: int) -> None:
    done: list[str] = []

    def run(heard: ProgressLog) -> None:
        with stopping_after_stage():
            stop = resource(StopSignals)
            with stop.stage(STAGE):
                _send(number)
                # Said while the stage is still running.
                _until(lambda: heard.lines)
                done.append("first")
            with stages_cancelled_on_interrupt(), stop.stage("iteration 3: evaluate"):
                done.append("second")

    stopped: list[StopSignals] = []

    def body(heard: ProgressLog) -> None:
        with pytest.raises(ENDS[number]):
            run(heard)
        stopped.append(resource(StopSignals))

    heard = _in_context(body)
    assert done == ["first"]
    # What other threads have begun is finished as well.
    assert not stopped[0].cancelled.is_set()
    assert [STAGE in line for line in heard.lines] == [True]
    assert signal.getsignal(signal.SIGTERM) is _terminated


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_one_stops_at_once_and_cancels_what_is_waited_for(number: int) -> None:
    reached: list[str] = []

    def body(heard: ProgressLog) -> None:
        stop = resource(StopSignals)

        def run() -> None:
            with stopping_after_stage(), stop.stage(STAGE):
                _send(number)
                _until(lambda: heard.lines)
                _send_and_wait(number)
                reached.append("the end")

        with pytest.raises(ENDS[number]):
            run()
        assert stop.cancelled.is_set()
        with pytest.raises(StageCancelledError):
            Cancellable(Silence(), stop).advance(STAGE, 1, 2)

    _in_context(body)
    assert reached == []


def test_after_sigterm_a_long_stage_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SECONDS_BEFORE_KILL", 0.2)

    def body(heard: ProgressLog) -> None:
        stop = resource(StopSignals)
        with pytest.raises(TerminatedError), stopping_after_stage(), stop.stage(STAGE):
            _send_and_wait(signal.SIGTERM)
        assert stop.cancelled.is_set()

    _in_context(body)


def test_where_no_stage_runs_the_first_one_stops_at_once() -> None:
    def body(heard: ProgressLog) -> None:
        with pytest.raises(KeyboardInterrupt), stopping_after_stage():
            _send_and_wait(signal.SIGINT)

    _in_context(body)


def test_a_stage_in_a_thread_is_the_last_one_there_too() -> None:
    """A run that prefetches: the main thread waits for the thread's rollouts."""
    begun: list[str] = []

    def body(heard: ProgressLog) -> None:
        stop, errors = resource(StopSignals), list[BaseException]()

        def sample() -> None:
            try:
                for stage in ("collect rollouts", "score rewards"):
                    with stop.stage(stage):
                        begun.append(stage)
                        _until(lambda: heard.lines)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=sample)
        with stopping_after_stage():
            thread.start()
            _until(lambda: begun)
            _send(signal.SIGINT)
            thread.join()
            assert isinstance(errors.pop(), KeyboardInterrupt)

    _in_context(body)
    assert begun == ["collect rollouts"]


def _signal_while_main_waits_to_import() -> None:
    _imp.acquire_lock()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    _imp.release_lock()


def _import_and_wait(other: threading.Thread) -> None:
    other.start()
    time.sleep(0.1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    time.sleep(5)


def test_a_signal_during_an_import_leaves_the_import_lock_free() -> None:
    def body(heard: ProgressLog) -> None:
        other = threading.Thread(target=_signal_while_main_waits_to_import)
        with pytest.raises(TerminatedError), stopping_after_stage():
            _import_and_wait(other)
        other.join()
        assert not _imp.lock_held()

    _in_context(body)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError])
def test_what_fails_after_a_signal_is_the_signal(error: type[BaseException], number: int) -> None:
    def interrupted(heard: ProgressLog) -> None:
        with stopping_after_stage(), resource(StopSignals).stage(STAGE):
            _send(number)
            _until(lambda: heard.lines)
            raise error

    def body(heard: ProgressLog) -> None:
        with pytest.raises(error), stopping_after_stage():
            raise error
        with pytest.raises(ENDS[number]):
            interrupted(heard)

    _in_context(body)


def _sleep() -> None:
    time.sleep(60)


def test_a_process_that_a_stage_forked_ends_by_its_own_signal_alone() -> None:
    """As the workers of `multiprocessing.Pool`, which a reward may have."""

    def body(heard: ProgressLog) -> None:
        with stopping_after_stage():
            with resource(StopSignals).stage(STAGE):
                child = multiprocessing.get_context("fork").Process(target=_sleep)
                child.start()
                os.kill(child.pid, signal.SIGINT)
                child.terminate()
                child.join(30)
                assert child.exitcode == -signal.SIGTERM
            assert heard.lines == []

    _in_context(body)


def test_before_a_stage_can_run_each_signal_raises_and_a_programs_own_handlers_stay() -> None:
    from prefect.exceptions import TerminationSignal

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminationSignal)):
        with pytest.raises(error), signals_raise():
            _send_and_wait(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, _terminated)
    with pytest.raises(TerminatedError), signals_raise():
        _send_and_wait(signal.SIGTERM)
