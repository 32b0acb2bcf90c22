"""The learning rate as a function of the step."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from grpo_core.errors import InputError

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
ScheduleValue = float | int | str | bool

WITH_LENGTH = frozenset(
    {"linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "warmup_stable_decay"}
)
WITHOUT_KWARGS = frozenset({"constant", "constant_with_warmup", "linear"})
PROBES = 64


class LearningRateSchedule:
    """One of transformers' schedules as a function of the step.

    Schedules that depend on the length of the run keep the rate of step `total_steps` from there on: a cosine would
    rise again. Most end at zero, and further steps change nothing.
    """

    def __init__(
        self,
        name: Schedule,
        learning_rate: float,
        *,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        kwargs: Mapping[str, ScheduleValue] | None = None,
    ) -> None:
        """Prepare a schedule.

        Args:
            name: as transformers calls it.
            learning_rate: after warm-up.
            warmup_steps: optimizer steps from zero to the learning rate.
            total_steps: length, warm-up included; ignored by schedules without a length.
            kwargs: further arguments of the schedule's function in transformers.

        Raises:
            InputError: a length that is missing or too short, or values that the schedule cannot be computed with.
        """
        given = dict(kwargs or {})
        self._last = _length(name, warmup_steps, total_steps, given)
        if given and name in WITHOUT_KWARGS:
            raise InputError("update.lr_scheduler_kwargs", given, f"{name} has no arguments; leave them out.")
        self._learning_rate = learning_rate
        try:
            self._multiplier = _multiplier(name, learning_rate, warmup_steps, self._last, given)
            rates = [self(step) for step in _probes(warmup_steps, self._last)]
        except (TypeError, ValueError, ArithmeticError) as error:
            hint = f"{name} cannot be computed with these values ({error})."
            raise InputError("update.lr_scheduler_kwargs", given, hint) from error
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            hint = f"{name} would give rates from {min(rates):g} to {max(rates):g}; none may be below zero."
            raise InputError("update.lr_scheduler_kwargs", given, hint)

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` earlier steps."""
        reached = step if self._last is None else min(step, self._last)
        return float(self._learning_rate * self._multiplier(reached))


def _length(name: str, warmup_steps: int, total_steps: int | None, kwargs: Mapping[str, ScheduleValue]) -> int | None:
    if name not in WITH_LENGTH:
        return None
    if total_steps is None:
        hint = "It depends on the length of the run; set update.total_steps, or use constant_with_warmup."
        raise InputError("update.lr_scheduler", name, hint)
    if warmup_steps >= total_steps:
        hint = f"{name} has {total_steps} optimizer steps in all; warm up for fewer."
        raise InputError("update.warmup_steps", warmup_steps, hint)
    if name == "warmup_stable_decay":
        _refuse_phases(warmup_steps, total_steps, kwargs)
    return total_steps


def _refuse_phases(warmup_steps: int, total_steps: int, kwargs: Mapping[str, ScheduleValue]) -> None:
    decay = kwargs.get("num_decay_steps")
    if not isinstance(decay, int) or isinstance(decay, bool) or not 0 <= decay <= total_steps - warmup_steps:
        hint = f"Set num_decay_steps, an integer from 0 to {total_steps - warmup_steps}: what warm-up leaves."
        raise InputError("update.lr_scheduler_kwargs", dict(kwargs), hint)
    if "num_stable_steps" in kwargs:
        hint = "Leave out num_stable_steps: it is total_steps without warm-up and decay."
        raise InputError("update.lr_scheduler_kwargs", dict(kwargs), hint)


def _multiplier(
    name: str, learning_rate: float, warmup_steps: int, total_steps: int | None, kwargs: dict[str, ScheduleValue]
) -> Callable[[int], float]:
    if name == "constant":
        return lambda step: 1.0
    # Importing its schedules takes seconds, and the checks of most configurations need none of them.
    from transformers import get_scheduler

    # transformers builds a schedule for an optimizer; this one only provides the learning rate.
    dummy_optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    scheduler = get_scheduler(name, dummy_optimizer, warmup_steps, total_steps, scheduler_specific_kwargs=kwargs)
    multiplier: Callable[[int], float] = scheduler.lr_lambdas[0]
    return multiplier


def _probes(warmup_steps: int, last: int | None) -> list[int]:
    """Return steps in every phase of a schedule."""
    end = 2 * warmup_steps + PROBES if last is None else last
    return sorted({0, max(warmup_steps - 1, 0), warmup_steps, *(end * part // PROBES for part in range(PROBES + 1))})
