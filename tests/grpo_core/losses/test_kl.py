"""k1, k2, k3 by hand, their means, and their gradients in expectation over all of four ids."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.losses import estimate_kl

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
