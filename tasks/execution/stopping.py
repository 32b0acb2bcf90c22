"""How a run stops: at the first signal after the stages that are running, at the second one at once.

A signal is only noted where it arrives, since a handler that waits for a lock, or raises inside an import, can leave a
process that never ends. A thread reads the notes, tells people what is waited for, and sends the signal that ends the
run to the main thread again. It also ends threads that wait for stages on pools, which no signal of the operating
system reaches.
"""

import asyncio
import contextlib
import contextvars
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from tasks.execution.errors import StageCancelledError
from tasks.execution.resources import resource
from tasks.progress import ProgressReporter, log

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS_BETWEEN_TRIES = 0.05  # until the main thread has left an import, or one long call, and takes the signal
SECONDS_BEFORE_KILL = 20.0  # SIGKILL follows 30 s after SIGTERM, and then no stage on a pool would be cancelled

_REQUESTED = {
    signal.SIGINT: "stopping after this stage ({}); Ctrl-C again to stop now",
    signal.SIGTERM: f"stopping after this stage ({{}}), or in {SECONDS_BEFORE_KILL:g} s; SIGTERM again to stop now",
}


class StopSignals:
    """What ends a run before its time."""

    def __init__(self) -> None:
        self.running: list[str] = []  # titles of the stages that are running
        # Raises the exception that ends the run, instead of its next stage; None while the run goes on.
        self.requested: Callable[[], object] | None = None
        self.cancelled = threading.Event()  # the run stops at once; every stage that is waited for is cancelled
        self.failed = threading.Event()  # a stage of the run failed; stages that no worker has taken are withdrawn

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Name what is running; when the run was asked to stop, raise what ends it instead (`stopping_after_stage`)."""
        self.running.append(title)
        try:
            if self.requested is not None:
                self.requested()
            yield
        finally:
            self.running.remove(title)


@contextlib.contextmanager
def stages_withdrawn_on_failure() -> Iterator[None]:
    """Withdraw every stage that no worker has taken when the run fails; one that has begun is waited for."""
    try:
        yield
    except Exception:
        resource(StopSignals).failed.set()
        raise


@contextlib.contextmanager
def stages_cancelled_on_interrupt() -> Iterator[None]:
    """Cancel every stage that is waited for when the run stops at once; one asked to stop waits for them."""
    try:
        yield
    except BaseException as error:
        stop = resource(StopSignals)
        if not isinstance(error, Exception) and stop.requested is None:
            stop.cancelled.set()
        raise


class Cancellable:
    """Passes progress on to a reporter, and ends the stage that reports it once the run stops at once."""

    def __init__(self, reporter: ProgressReporter, stop: StopSignals) -> None:
        self.reporter, self.stop = reporter, stop

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage; StageCancelledError once the run stops: no signal reaches a thread."""
        if self.stop.cancelled.is_set():
            raise StageCancelledError(f"{stage}: the run that requested it was stopped")
        self.reporter.advance(stage, done, total)

    def log(self, line: str) -> None:
        """Show a line of text."""
        self.reporter.log(line)


@contextlib.contextmanager
def stopping_after_stage() -> Iterator[None]:
    """Stop the run of this context after its running stages at the first SIGINT or SIGTERM, at once at the second.

    Where no stage is running, the first one stops at once; after SIGTERM a long stage is not waited for. Outside of the
    main thread no signal arrives, and nothing is changed. A signal that is ignored, or that ends the process without a
    handler, is left as it is. SIGINT raises KeyboardInterrupt, and SIGTERM what the handler that was there raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _Signals(resource(StopSignals)) as signals:
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            # A terminal sends SIGINT to its whole group of processes, so a child of a stage may have ended first; and
            # a stage that no worker has taken is withdrawn.
            if signals.first is not None:
                signals.end(signals.first, error)
            raise


class _Signals:
    """Notes signals for the time of a context, and acts on them in a thread."""

    def __init__(self, stop: StopSignals) -> None:
        self.first: int | None = None  # number of the signal that came first
        self._stop, self._due, self._raised = stop, False, False
        self._until: float | None = None
        self._previous: dict[int, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._watch,), name="stop signals", daemon=True
        )

    def __enter__(self) -> "_Signals":
        global _current
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self._previous = {int(number): handler for number, handler in previous.items() if callable(handler)}
        # Written by the interpreter as soon as a signal arrives, also during a long call of the main thread.
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._previous:
            signal.signal(number, self._handle)
        _current = self
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        global _current
        self._raised, _current = True, None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # An exception inside the import machinery would leave its lock taken; the thread sends the signal again.
        if self._due and not self._raised and not holds_import_lock(frame):
            self._raised = True
            self.end(number)

    def end(self, number: int, cause: BaseException | None = None) -> NoReturn:
        """Raise what ends the run, in the main thread or in one that is about to begin a stage."""
        try:
            if number == signal.SIGTERM:
                self._previous[number](number, None)
            raise KeyboardInterrupt
        except BaseException as ended:
            raise ended from cause

    def _watch(self) -> None:
        """Take one signal after the other until the context ends."""
        while (number := self._next()) is not None:
            if self._due:
                continue
            running = ", ".join(self._stop.running)
            self._stop.requested = partial(self.end, number)
            if self.first is None and running:
                self.first = number
                log(_REQUESTED[signal.Signals(number)].format(running))
                if number == signal.SIGTERM:
                    self._until = time.monotonic() + SECONDS_BEFORE_KILL
                continue
            self.first, self._until = self.first or number, None
            self._due = True
            self._stop.cancelled.set()
            while not self._raised:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                time.sleep(_SECONDS_BETWEEN_TRIES)

    def _next(self) -> int | None:
        """Wait for the next signal, or for the time at which the first one stops at once; None at the end."""
        while True:
            left = None if self._until is None else max(0.0, self._until - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                return self.first
            numbers = os.read(self._read, 1)
            if not numbers:
                return None
            if numbers[0] in self._previous:
                return numbers[0]


_current: _Signals | None = None


_before_fork = threading.local()


def _block_signals() -> None:
    if _current is not None:
        _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock_signals() -> None:
    if (mask := _before_fork.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave_signals_to_parent() -> None:
    global _current
    if _current is not None:
        _current = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _unblock_signals()


# A process that a stage forks, such as one of `multiprocessing.Pool`, must not report signals as the run. Ctrl-C
# reaches it too, and the stage, which is finished first, still needs it.
os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_leave_signals_to_parent)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGINT and SIGTERM end a flow by KeyboardInterrupt and TerminationSignal, also before any stage runs.

    asyncio would cancel its main task at the first SIGINT, and a flow may not suspend for minutes; Prefect would end
    the process by SIGTERM before the command could say how to resume. Outside of the main thread, and where a program
    has handlers of its own, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Those of the interpreter and of the system, which asyncio and Prefect replace.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    changed = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in changed:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    if holds_import_lock(frame):
        threading.Timer(_SECONDS_BETWEEN_TRIES, os.kill, (os.getpid(), number)).start()
        return
    if number == signal.SIGTERM:
        from prefect.exceptions import TerminationSignal

        raise TerminationSignal(number)
    raise KeyboardInterrupt


def holds_import_lock(frame: FrameType | None) -> bool:
    """Return whether the interrupted code is the import machinery, whose lock an exception would leave taken."""
    return frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap"
