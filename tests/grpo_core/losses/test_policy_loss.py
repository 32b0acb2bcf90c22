"""KL by hand and in expectation; weights and masks at their edges."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses import (
    MismatchSettings,
    entropy_threshold,
    estimate_kl,
    mismatch_weights,
    on_policy_rows,
)


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


LOGITS = torch.tensor([[0.3, -1.0, 0.7, 0.2]], dtype=torch.float64)
OLD = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
REFERENCE = torch.tensor([[0.4, 0.1, 0.25, 0.25]], dtype=torch.float64).log()
ALL = torch.ones(1, 4, dtype=torch.bool)


def gradient(objective: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(objective, logits)[0]


def policy() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(-1)


def true_kl_gradient(*, reverse: bool) -> Tensor:
    logits, logprobs = policy()
    if reverse:
        return gradient((logprobs.exp() * (logprobs - REFERENCE)).sum(), logits)
    return gradient((REFERENCE.exp() * (REFERENCE - logprobs)).sum(), logits)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_on_policy(estimator: Any) -> None:
    """k1: none. k2: that of KL(policy || reference). k3: that of KL(reference || policy)."""
    logits, logprobs = policy()
    found = gradient((logprobs.detach().exp() * estimate_kl(logprobs, REFERENCE, ALL, estimator)).sum(), logits)
    expected = {
        "k1": torch.zeros_like(LOGITS),
        "k2": true_kl_gradient(reverse=True),
        "k3": true_kl_gradient(reverse=False),
    }[estimator]
    torch.testing.assert_close(found, expected)
