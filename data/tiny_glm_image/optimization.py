"""The schedule and the optimizer step of the supervised trainings."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from grpo_core.errors import NonFiniteError

# Called after each step with (steps done, total steps, loss of this step).
ProgressCallback = Callable[[int, int, float], None]

_WARMUP = 0.05
_FLOOR = 0.02
_MAX_GRAD_NORM = 1.0


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a linear warm-up over the first twentieth, then a cosine down to 1/50 of the peak; `step` is from 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class SupervisedOptimizer:
    """AdamW with gradient clipping and the schedule of :func:`learning_rate_factor`."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, steps: int) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, steps)
        )

    def step(self, loss: Tensor) -> float:
        """Make one step on a scalar loss and return the loss.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteError("supervised loss", [], "Lower the recipe's learning rate.")
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, _MAX_GRAD_NORM)
        self._optimizer.step()
        self._schedule.step()
        return value
