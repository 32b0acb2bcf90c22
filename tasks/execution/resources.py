"""What a run keeps from one stage to the next: the loaded policy, child processes, device memory, stop signals.

`run_resources()` opens the collection, and `resource(Kind)` returns the one object of a kind, created on first use.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from grpo_core.errors import InputError
from tasks.progress import log

R = TypeVar("R")
V = TypeVar("V")


class _FittingValues(dict[tuple[str, str, object], Any]):
    """Values that fit after another had failed, by run, setting and configured value."""


def retry_on_out_of_memory(
    title: str, run: str, setting: str, value: V, less: Callable[[V], V], call: Callable[[V], R]
) -> R:
    """Call a function with a value, and once more with one that needs less if the device's memory is too small.

    The second is remembered: the run's later calls for the same setting begin with it. No result is keyed by it. The
    call does all of the work, and must have no effect when it raises. OutOfMemoryError if less is too much as well, or
    there is no less.
    """
    fitting, key = resource(_FittingValues), (run, setting, value)
    current = fitting.get(key, value)
    smaller = less(current)
    try:
        return call(current)
    except torch.OutOfMemoryError as error:
        if smaller == current:
            raise
        message = str(error).partition(". ")[0]
    # Outside of the except clause, since the error keeps frames and their tensors alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    fitting[key] = smaller
    log(f"{title}: {message}; running it again, and later ones, with {setting} {smaller} instead of {current}")
    return call(smaller)


_OTHERS = {
    "rollout.prompts_per_batch": "rollout.decode_batch_size, or the group size",
    "update.micro_batch_size": "turn on policy.gradient_checkpointing",
}


def halve_on_out_of_memory(title: str, run: str, setting: str, size: int, call: Callable[[int], R]) -> R:
    """Call a function with a batch size, and with half of it as in `retry_on_out_of_memory`.

    InputError, which names `setting`, if half of the size is too much as well, or the size is 1.
    """
    tried: list[int] = []

    def sized(current: int) -> R:
        tried.append(current)
        return call(current)

    try:
        return retry_on_out_of_memory(title, run, setting, size, lambda current: max(1, current // 2), sized)
    except torch.OutOfMemoryError as error:
        message = str(error).partition(". ")[0]
        hint = (
            f"The device's memory is too small for {title} ({message}). Lower it, or the image or completion size, or "
            f"{_OTHERS[setting]}: docs/first_gpu.md."
        )
        raise InputError(setting, tried[-1], hint) from error


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
