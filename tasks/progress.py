"""How far a run is, for whoever listens: bars in a terminal, lines elsewhere, or nobody."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol


class ProgressReporter(Protocol):
    """Hears of progress."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """So many of a stage's units are done; the first call comes with none, before the work."""

    def log(self, line: str) -> None:
        """Something that is over and that a person wants to read."""


class _Nobody:
    def advance(self, stage: str, done: int, total: int) -> None:
        """Drop the news."""

    def log(self, line: str) -> None:
        """Drop the news."""


_LISTENER: ContextVar[ProgressReporter] = ContextVar("progress_listener", default=_Nobody())  # noqa: B039  (it has no state)


def listen(listener: ProgressReporter) -> None:
    """Hear of progress in the present context."""
    _LISTENER.set(listener)


def has_listener() -> bool:
    """Whether anybody listens in the present context."""
    return not isinstance(_LISTENER.get(), _Nobody)


def listener() -> ProgressReporter:
    """Whoever hears of progress in the present context."""
    return _LISTENER.get()


def progress_of(stage: str, total: int) -> Callable[[int, int], None]:
    """Begin a stage of `total` units; the returned function tells how many are done, and of how many."""
    reporting_to = _LISTENER.get()
    reporting_to.advance(stage, 0, total)
    return lambda done, total: reporting_to.advance(stage, done, total)


def log(line: str) -> None:
    """Tell people a line."""
    _LISTENER.get().log(line)
