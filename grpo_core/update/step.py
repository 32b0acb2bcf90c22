"""One optimizer step, from the gradient that the passes over a minibatch added up."""

import math

import torch

from grpo_core.errors import NonFiniteError
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.update.gradient import Minibatch, Passes
from grpo_core.update.metrics import StepMetrics
from grpo_core.update.process_group import ProcessGroup
from grpo_core.update.settings import UpdateSettings


def optimizer_step(
    optimizer: PolicyOptimizer,
    minibatch: Minibatch,
    passes: Passes,
    settings: UpdateSettings,
    process_group: ProcessGroup,
) -> StepMetrics:
    """Sum the gradients of all processes, clip them, and make one step.

    Raises:
        NonFiniteError: a loss or the gradient is not finite; names the samples. No weight was changed by this step.
    """
    if passes.broken:
        hint = "Lower the learning rate, or inspect these samples' stored log-probs."
        raise NonFiniteError("loss", passes.broken, hint)
    parameters = list(optimizer.parameters.values())
    process_group.add_gradients(parameters)
    grad_norm = process_group.gradient_norm(parameters, settings.max_grad_norm)
    if not math.isfinite(grad_norm):
        hint = "Lower the learning rate, or inspect these samples; the last policy version is intact."
        raise NonFiniteError("gradient", minibatch.sample_ids, hint)
    learning_rate = optimizer.learning_rate
    optimizer.step()
    _require_finite_weights(optimizer, minibatch, process_group)
    return passes.sums.metrics(
        process_group, grad_norm=grad_norm, learning_rate=learning_rate, with_reference=settings.with_reference
    )


def _require_finite_weights(optimizer: PolicyOptimizer, minibatch: Minibatch, process_group: ProcessGroup) -> None:
    """Raise on every process if one of them has a broken weight; otherwise the others would wait for it."""
    shares = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in optimizer.parameters.values())
    broken = sum(int(not torch.isfinite(share.detach()).all()) for share in shares)
    if float(process_group.add(torch.tensor(float(broken)))):
        hint = "Lower the learning rate or the weight decay; the last policy version is intact."
        raise NonFiniteError("weight after a step", minibatch.sample_ids, hint)
