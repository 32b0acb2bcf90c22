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
    """Lines on stderr, for logs: one when a stage ends, and one every half minute until then."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.printed: dict[str, float] = {}

    def advance(self, stage: str, done: int, total: int) -> None:
        """Print a line if the stage has ended, or the last line is half a minute old."""
        now = time.perf_counter()
        seconds = now - self.begun.setdefault(stage, now)
        ended = done == total
        if ended or now - self.printed.setdefault(stage, now) >= SECONDS_BETWEEN_LINES:
            self.printed[stage] = now
            self.log(f"{stage}: {done}/{total} in {seconds:.1f} s")
        if ended:
            # A title names its iteration, so it does not come again.
            del self.begun[stage], self.printed[stage]

    def log(self, line: str) -> None:
        """Print a line."""
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
    """Begin a stage.

    Args:
        stage: title of the stage.
        total: samples that it handles; the unit and the total stay the same until its end.

    Returns:
        A function to call with the number of samples that are done.
    """
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
    """Report that an iteration of the run has ended.

    Args:
        pace: seconds per iteration; None before one was trained.
    """
    if (bar := _RUN_BAR.get()) is not None:
        bar(done, total, pace)
