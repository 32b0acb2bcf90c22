"""Resources that a run keeps from one stage to the next: the loaded policy, child processes, stop signals.

`run_resources()` opens the collection, and `resource(Kind)` returns the one object of a kind, created on first use.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
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
