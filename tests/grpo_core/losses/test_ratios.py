"""Ratios by hand; weights and masks at their edges."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses import (
    MismatchSettings,
    entropy_threshold,
    importance_ratio,
    mismatch_weights,
    on_policy_rows,
    token_log_ratio,
)
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


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_product_too_large_for_a_float_is_bounded(mode: Any) -> None:
    far = torch.full((1, 400), 1.0)
    found = mismatch_weights(far, torch.zeros(1, 400), far.bool(), MismatchSettings(mode, "sequence"))
    assert torch.equal(found, torch.full((1, 400), 3.0 if mode == "truncate" else 0.0))


def test_a_log_prob_that_is_not_a_number_stays_one() -> None:
    """A weight made up in its place would hide a damaged record."""
    rollout = torch.tensor([[math.nan, 0.0]])
    found = mismatch_weights(torch.zeros(1, 2), rollout, torch.ones(1, 2).bool(), MismatchSettings("mask"))
    assert found.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("cap", "floor", "place"),
    [(0.9, 0.0, "cap"), (math.nan, 0.0, "cap"), (3.0, 1.1, "floor"), (3.0, -0.1, "floor"), (1.0, 1.0, "floor")],
)
def test_bounds_that_exclude_agreement_are_refused(cap: float, floor: float, place: str) -> None:
    with pytest.raises(InputError, match=rf"update\.mismatch\.{place}"):
        MismatchSettings("truncate", "token", cap, floor)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="part of the tokens to keep"):
        entropy_threshold(torch.ones(3), share)


def test_a_row_without_tokens_has_not_drifted() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    rows = on_policy_rows(
        torch.zeros(1, 2), torch.full((1, 2), torch.inf), torch.tensor([-1.0]), nothing, threshold=0.1
    )
    assert rows.tolist() == [True]
