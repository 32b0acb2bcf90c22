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


def test_by_hand() -> None:
    """lp = ln .5, ref = ln .25: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = .5 + ln 2 - 1."""
    logprobs, reference = torch.tensor([[0.5, 0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5, 0.9]]).log()
    mask = torch.tensor([[True, True, False]])
    for estimator, expected in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        found = estimate_kl(logprobs, reference, mask, estimator)
        assert found[0].tolist() == pytest.approx([expected, 0, 0], abs=1e-6)
    assert float(estimate_kl(reference, logprobs, mask, "k1")[0, 0]) == pytest.approx(-0.693147)


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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Any) -> None:
    """Their mean under the policy is KL(policy || reference), summed by definition; k2's is not."""
    kl = (OLD.exp() * (OLD - REFERENCE)).sum()
    mean = (OLD.exp() * estimate_kl(OLD, REFERENCE, ALL, estimator)).sum()
    torch.testing.assert_close(mean, kl)
    assert abs(float((OLD.exp() * estimate_kl(OLD, REFERENCE, ALL, "k2")).sum() - kl)) > 0.01


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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_gradient_off_policy_with_the_importance_ratio(estimator: Any) -> None:
    """Samples of another policy, weighted by the ratio: that of KL(policy || reference)."""
    logits, logprobs = policy()
    ratio = (logprobs - OLD).exp()
    kl = estimate_kl(logprobs, REFERENCE, ALL, estimator, importance_ratio=ratio)
    torch.testing.assert_close(gradient((OLD.exp() * kl).sum(), logits), true_kl_gradient(reverse=True))
