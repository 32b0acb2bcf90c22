"""The supervised training of both tiny models, and the file that says how a shipped model was made."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_core.errors import NonFiniteError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    steps: int,
    loss_of_next_batch: Callable[[], Tensor],
    on_step: ProgressCallback | None,
) -> float:
    """Train in place and return the mean loss over the last twentieth of the steps.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    optimizer = SupervisedOptimizer(parameters, learning_rate, steps)
    losses = []
    model.train()
    for step in range(steps):
        losses.append(optimizer.step(loss_of_next_batch()))
        if on_step is not None:
            on_step(step + 1, steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    return sum(tail) / len(tail)


RECIPE_FILE = "recipe.json"


def write_recipe(
    folder: Path, recipe: "DataclassInstance", measured: Mapping[str, object], *, libraries: Sequence[str]
) -> None:
    """Write recipe.json into a saved model's folder: the recipe, library versions, and what was measured.

    Args:
        measured: plain JSON values by name, such as the fields of the training metrics and reports.
        libraries: those whose versions affect the result.
    """
    content = {
        "recipe": asdict(recipe),
        "versions": {name: version(name) for name in libraries},
        "measured": dict(measured),
    }
    (folder / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
