"""The KL of a row by hand."""

import math

import pytest
import torch

from grpo_core.advantages import kl_penalty
from grpo_core.losses import KlEstimator

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, math.nan, 7.0]])
REFERENCE = torch.tensor([[-1.5, -1.0, -9.0], [-0.5 + math.log(2), 1.0, math.inf]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("k1", 0.5 - 1.0, -math.log(2)),
        ("k2", (0.25 + 1.0) / 2, math.log(2) ** 2 / 2),
        ("k3", (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1), 2 - math.log(2) - 1),
    ],
)
def test_the_sum_over_trained_tokens(estimator: KlEstimator, first: float, second: float) -> None:
    """Differences .5 and -1 in the first row, -log 2 in the second; what is masked may be anything."""
    assert kl_penalty(LOGPROBS, REFERENCE, MASK, estimator=estimator).tolist() == pytest.approx([first, second])


def test_a_row_without_trained_tokens_pays_nothing() -> None:
    assert kl_penalty(LOGPROBS, REFERENCE, torch.zeros_like(MASK), estimator="k1").tolist() == [0.0, 0.0]
