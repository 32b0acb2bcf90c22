"""Run a stage that ran out of device memory again with half its batch, and begin later stages with that size."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from grpo_core.errors import InputError
from tasks.execution.resources import resource
from tasks.progress import log

R = TypeVar("R")


class _FittingSizes(dict[tuple[str, str, int], int]):
    """Batch sizes that fit after a larger one had failed, by run, setting and configured size."""


def halve_on_out_of_memory(title: str, run: str, setting: str, size: int, call: Callable[[int], R]) -> R:
    """Call a function with a batch size, and once more with half of it if the device's memory is too small.

    The half is remembered: the run's later calls for the same setting begin with it. No result is keyed by it.

    Args:
        title: title of the stage, for messages.
        run: name of the run.
        setting: key of the configuration that gives the size.
        size: samples or prompts per batch, as configured.
        call: does all of the work; must have no effect when it raises.

    Raises:
        InputError: half of the size is too much as well, or the size is 1.
    """
    fitting, key = resource(_FittingSizes), (run, setting, size)
    current = fitting.get(key, size)
    try:
        return call(current)
    except torch.OutOfMemoryError as error:
        if current == 1:
            raise _too_large(setting, current, error) from error
        message = str(error).partition(". ")[0]
    # Outside of the except clause, since the error keeps frames and their tensors alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = fitting[key] = current // 2
    log(f"{title}: {message}; running it again, and later ones, with {setting} {half} instead of {current}")
    try:
        return call(half)
    except torch.OutOfMemoryError as error:
        raise _too_large(setting, half, error) from error


def _too_large(setting: str, size: int, error: torch.OutOfMemoryError) -> InputError:
    hint = (
        f"The device's memory is too small for it ({str(error).partition('. ')[0]}). Lower it, the image or completion "
        "size, or the group size; or turn on policy.gradient_checkpointing if an update fails."
    )
    return InputError(setting, size, hint)
