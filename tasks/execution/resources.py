"""What a run keeps from one stage to the next: the loaded policy, child processes, device memory, stop signals.

`run_resources()` opens the collection, and `resource(Kind)` returns the one object of a kind, created on first use.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

import torch

from grpo_core.errors import InputError
from tasks.progress import log

R = TypeVar("R")


class _FittingSizes(dict[tuple[str, str, int], int]):
    """Batch sizes that fit after a larger one had failed, by run, setting and configured size."""


_OTHERS = {
    "rollout.prompts_per_batch": "rollout.decode_batch_size, or the group size",
    "update.micro_batch_size": "turn on policy.gradient_checkpointing",
}


def halve_on_out_of_memory(title: str, run: str, setting: str, size: int, call: Callable[[int], R]) -> R:
    """Call a function with a batch size, and once more with half of it if the device's memory is too small.

    The half is remembered: the run's later calls for the same setting begin with it. No result is keyed by it. The call
    does all of the work, and must have no effect when it raises. InputError, which names `setting`, if half of the size
    is too much as well, or the size is 1.
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
                    f"The device's memory is too small for {title} ({message}). Lower it, or the image or completion "
                    f"size, or {_OTHERS[setting]}: docs/first_gpu.md."
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
        # In the order in which they were made, also if one of them fails.
        with contextlib.ExitStack() as stack:
            for each in reversed(self._objects.values()):
                if (close := getattr(each, "close", None)) is not None:
                    stack.callback(close)


_CURRENT: ContextVar[_Resources | None] = ContextVar("run_resources", default=None)


@contextlib.contextmanager
def run_resources() -> Iterator[None]:
    """Open a collection for this context, and for the threads and tasks that copy it; close it at the end."""
    token = _CURRENT.set(resources := _Resources())
    try:
        yield
    finally:
        try:
            resources.close()
        finally:
            _CURRENT.reset(token)


def resource(kind: type[R]) -> R:
    """Return the object of a class of the current run, or of the calling context, built without arguments."""
    resources = _CURRENT.get()
    if resources is None:
        _CURRENT.set(resources := _Resources())
    return resources.get(kind)
