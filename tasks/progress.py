"""How far a stage is, for whoever listens: a bar in a terminal, or nobody."""

from collections.abc import Callable
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]


def _nobody(stage: str, done: int, total: int) -> None:
    """Drop the news."""


_LISTENER: ContextVar[Listener] = ContextVar("progress_listener", default=_nobody)


def listen(listener: Listener) -> None:
    """Hear of progress in the present context: stage, units done, units in all."""
    _LISTENER.set(listener)


def progress_of(stage: str) -> Callable[[int, int], None]:
    """A function for one stage to tell how many of its units are done."""
    listener = _LISTENER.get()
    return lambda done, total: listener(stage, done, total)
