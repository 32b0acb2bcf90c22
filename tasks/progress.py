"""Report the progress of a run: to bars in a terminal, to lines of a log, or to no reporter."""

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol


class ProgressReporter(Protocol):
    """Shows progress to people."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of a stage's `total` samples are done; the first call comes with 0, before the work."""

    def log(self, line: str) -> None:
        """Show a line of text."""


class Silence:
    """Shows nothing."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Show nothing."""

    def log(self, line: str) -> None:
        """Show nothing."""


SECONDS_BETWEEN_LINES = 30.0


class Lines:
    """Lines on stderr, for logs: those of the run, and one every half minute of a stage that takes longer than that."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._printed: dict[str, float] = {}
        self._last = self._started = time.perf_counter()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Print a line if the stage's last one, or its begin, is half a minute old; and at the end of such a stage."""
        now = time.perf_counter()
        begun = self._begun.setdefault(stage, now)
        due = now - self._printed.get(stage, begun) >= SECONDS_BETWEEN_LINES
        if done == total:
            due = now - begun >= SECONDS_BETWEEN_LINES
            self._begun.pop(stage, None)
            self._printed.pop(stage, None)
        if due:
            if done < total:
                self._printed[stage] = now
            self.log(f"{stage}: {done}/{total} in {now - begun:.1f} s")

    def advance_run(self, done: int, total: int, pace: float | None) -> None:
        """Print a line if there was none of any kind for half a minute; the arguments are those of `advance_run`."""
        now = time.perf_counter()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self.log(f"{done}/{total} iterations in {now - self._started:.1f} s")

    def log(self, line: str) -> None:
        """Print a line."""
        self._last = time.perf_counter()
        print(line, file=sys.stderr, flush=True)


_UNSET = Silence()
_REPORTER: ContextVar[ProgressReporter] = ContextVar("progress_reporter", default=_UNSET)


def listen(reporter: ProgressReporter) -> None:
    """Send the progress of this context to a reporter."""
    _REPORTER.set(reporter)


def has_listener() -> bool:
    """Whether this context has a reporter, which may be silent on purpose."""
    return _REPORTER.get() is not _UNSET


def listener() -> ProgressReporter:
    """Return the reporter of this context."""
    return _REPORTER.get()


def progress_of(stage: str, total: int) -> Callable[[int], None]:
    """Begin a stage of `total` samples; return a function to call with the number of those that are done."""
    reporter = _REPORTER.get()
    reporter.advance(stage, 0, total)
    return lambda done: reporter.advance(stage, done, total)


def log(line: str) -> None:
    """Show a line of text to people."""
    _REPORTER.get().log(line)


RunBar = Callable[[int, int, float | None], None]
"""Shows how far a run is: iterations that are done, their total, and seconds per iteration where that is known."""

_RUN_BAR: ContextVar[RunBar | None] = ContextVar("run_bar", default=None)


def show_run(bar: RunBar) -> None:
    """Show how far the run of this context is."""
    _RUN_BAR.set(bar)


def advance_run(done: int, total: int, pace: float | None) -> None:
    """Report that an iteration of the run has ended; `pace` is seconds per iteration, None before one was trained."""
    if (bar := _RUN_BAR.get()) is not None:
        bar(done, total, pace)
