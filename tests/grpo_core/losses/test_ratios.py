"""Ratios by hand, and what must hold for any numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.losses import importance_ratio, token_log_ratio
from grpo_core.losses.ratios import log_ratio_at

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
LOG_RATIO = torch.tensor([[2.0, 8.0, 99.0], [1.0, 2.0, 4.0], [5.0, 5.0, 5.0]]).log()


def ratio_at(log_ratio: Tensor, mask: Tensor, level: Any) -> Tensor:
    return importance_ratio(log_ratio_at(log_ratio, mask, level))


def test_by_hand() -> None:
    """Sequence: the geometric mean of 2 and 8, of 1, 2 and 4, and 1 for a row without tokens."""
    tokens = ratio_at(LOG_RATIO, MASK, "token")
    assert tokens[:2, :2].flatten().tolist() == pytest.approx([2, 8, 1, 2])
    sequence = ratio_at(LOG_RATIO, MASK, "sequence")
    torch.testing.assert_close(sequence, torch.tensor([[4.0] * 3, [2.0] * 3, [1.0] * 3]))


def test_gradient_of_a_sequence_ratio_by_hand() -> None:
    """d s / d logprob = s / length for each token of the row, and 0 where masked."""
    logprobs = torch.where(MASK, LOG_RATIO, 0.0).requires_grad_()
    log_ratio = token_log_ratio(logprobs, torch.zeros_like(LOG_RATIO), MASK)
    ratio_at(log_ratio, MASK, "sequence")[:, 0].sum().backward()
    assert logprobs.grad is not None
    expected = [[2, 2, 0], [2 / 3, 2 / 3, 2 / 3], [0, 0, 0]]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float32))
