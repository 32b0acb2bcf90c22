"""The schedule by hand, and a loss that is not finite never passes."""

import pytest
import torch
from torch import nn

from data.tiny_glm_image.optimization import SupervisedOptimizer, learning_rate_factor
from grpo_core.errors import NonFiniteError


@pytest.mark.parametrize(("step", "factor"), [(0, 0.2), (4, 1.0), (5, 1.0), (52, 0.5181), (99, 0.0203)])
def test_schedule_over_a_hundred_steps(step: int, factor: float) -> None:
    # Warm-up is five steps; then 0.02 + 0.98 * (1 + cos(pi * (step - 5) / 95)) / 2.
    assert learning_rate_factor(step, 100) == pytest.approx(factor, abs=2e-4)


def test_first_step_is_adams_sign_step_at_the_warmed_learning_rate() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = SupervisedOptimizer([weight], learning_rate=0.1, steps=100)
    assert optimizer.step((weight * torch.tensor([3.0, -0.5])).sum()) == pytest.approx(4.0)
    # Decoupled decay of 0.01 and a step of 0.2 * 0.1 against the gradient's sign.
    expected = torch.tensor([1.0, -2.0]) * (1 - 0.02 * 0.01) - 0.02 * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = SupervisedOptimizer([weight], learning_rate=0.1, steps=10)
    with pytest.raises(NonFiniteError, match="supervised loss"):
        optimizer.step((weight * bad).sum())
    assert weight.item() == 1.0
