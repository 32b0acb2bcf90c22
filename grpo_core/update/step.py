"""One optimizer step, from the gradient that the passes over a minibatch added up, and what surrounds the steps."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from grpo_core.errors import NonFiniteError
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.parity import ParityError
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.update.process_group import ProcessGroup

Progress = Callable[[int, int], None]
Tick = Callable[[], None]


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer step was made with.

    Attributes:
        grad_norm: of all processes' gradient, before it was clipped.
        learning_rate: of the step.
    """

    grad_norm: float
    learning_rate: float


def optimizer_step(
    optimizer: PolicyOptimizer,
    sample_ids: Sequence[str],
    broken: Sequence[str],
    max_grad_norm: float,
    process_group: ProcessGroup,
) -> OptimizerStep:
    """Sum the gradients of all processes, clip them, and make one step.

    Args:
        sample_ids: names of the minibatch's rows.
        broken: names of the samples whose loss is not finite.
        max_grad_norm: the gradient is scaled to this norm.

    Raises:
        NonFiniteError: a loss or the gradient is not finite; names the samples. No weight was changed by this step.
    """
    if broken:
        hint = "Lower the learning rate, or inspect what is stored of these samples."
        raise NonFiniteError("loss", broken, hint)
    parameters = list(optimizer.parameters.values())
    process_group.add_gradients(parameters)
    grad_norm = process_group.gradient_norm(parameters, max_grad_norm)
    if not math.isfinite(grad_norm):
        hint = "Lower the learning rate, or inspect these samples; the last policy version is intact."
        raise NonFiniteError("gradient", sample_ids, hint)
    learning_rate = optimizer.learning_rate
    optimizer.step()
    _require_finite_weights(optimizer, sample_ids, process_group)
    return OptimizerStep(grad_norm, learning_rate)


def _require_finite_weights(optimizer: PolicyOptimizer, sample_ids: Sequence[str], process_group: ProcessGroup) -> None:
    """Raise on every process if one of them has a broken weight; otherwise the others would wait for it."""
    shares = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in optimizer.parameters.values())
    broken = sum(int(not torch.isfinite(share.detach()).all()) for share in shares)
    if float(process_group.add(torch.tensor(float(broken)))):
        hint = "Lower the learning rate or the weight decay; the last policy version is intact."
        raise NonFiniteError("weight after a step", sample_ids, hint)


@contextmanager
def no_gradient_of_a_refused_update(optimizer: PolicyOptimizer) -> Iterator[None]:
    """Leave no gradient behind if the update inside is refused."""
    try:
        yield
    except (ParityError, NonFiniteError):
        optimizer.zero_grad()
        raise


@contextmanager
def keeping_old(component: PolicyComponent, *, needed: bool) -> Iterator[None]:
    """Keep the weights before the update, for losses that measure how far it has moved."""
    if needed:
        component.trained.keep("old")
    try:
        yield
    finally:
        if needed:
            del component.trained.copies["old"]


def passes_of(rows: int, micro_batch_size: int, process_group: ProcessGroup) -> int:
    """Return the number of passes of one process over these rows."""
    parts = -(-rows // micro_batch_size)
    return -(-parts // process_group.count)


def counter(total: int, report: Progress | None) -> Tick:
    """Return what is called after each pass, and reports the number of passes done with their total."""
    done = itertools.count(1)

    def tick() -> None:
        count = next(done)
        if report:
            report(count, total)

    return tick
