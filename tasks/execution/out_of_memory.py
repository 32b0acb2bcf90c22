"""A stage that ran out of a device's memory is done again in halves, once; beyond that a person has to decide."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from grpo_core.errors import InputError
from tasks.progress import log

R = TypeVar("R")


def halved_once(title: str, setting: str, size: int, run: Callable[[int], R]) -> R:
    """Do something in batches of a size, and where memory does not hold them in batches of half the size.

    Args:
        title: what is done, for people.
        setting: that says the size.
        size: samples or prompts at once, as configured.
        run: does it from the beginning; what it had written half is gone once it has raised.

    Raises:
        InputError: half the size is too much as well, or there is no half.
    """
    try:
        return run(size)
    except torch.OutOfMemoryError as error:
        if size == 1:
            raise _too_much(setting, size, error) from error
        message = str(error).partition(". ")[0]
    # Outside the except clause: the error holds the frames, and these the tensors.
    _give_back()
    half = size // 2
    log(f"{title}: {message}; done again with {setting} {half} in the place of {size}")
    try:
        return run(half)
    except torch.OutOfMemoryError as error:
        raise _too_much(setting, half, error) from error


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _too_much(setting: str, size: int, error: torch.OutOfMemoryError) -> InputError:
    hint = (
        f"The device's memory does not hold it ({str(error).partition('. ')[0]}). Lower it, the image or completion "
        "size, or the group size; or turn on policy.gradient_checkpointing where an update fails."
    )
    return InputError(setting, size, hint)
