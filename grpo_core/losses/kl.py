"""Estimates of KL(policy || reference) from one sampled token: k1, k2, k3.

Schulman, 2020, "Approximating KL divergence". As numbers, k1 and k3 are unbiased and k2 is not. As terms of a loss
their gradients on policy differ (Liu et al., 2025, arXiv:2510.01555): that of k1 is zero in expectation, that of k2
is the gradient of KL(policy || reference), that of k3 is the gradient of KL(reference || policy). Multiplied by the
importance ratio, k1 and k3 both have the gradient of KL(policy || reference), off policy too.
"""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def k1_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The difference logprobs - ref_logprobs; of either sign, 0 where masked. Meant for the reward: see the module."""
    return torch.where(loss_mask, logprobs - ref_logprobs.detach(), 0.0)


def k2_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """(logprobs - ref_logprobs)^2 / 2; never negative, 0 where masked."""
    return k1_kl(logprobs, ref_logprobs, loss_mask).square() / 2.0


def k3_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """exp(ref - lp) - (ref - lp) - 1; unbiased and never negative, 0 where masked."""
    difference = -k1_kl(logprobs, ref_logprobs, loss_mask)
    return torch.expm1(difference) - difference


def estimate_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    estimator: KlEstimator,
    *,
    importance_ratio: Float[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch time"]:
    """One estimate a token, nats; the gradient reaches `logprobs` and the ratio.

    Args:
        logprobs: under the policy.
        ref_logprobs: under the reference; a constant.
        loss_mask: True for a trained token.
        estimator: k1, k2 or k3.
        importance_ratio: with gradient; multiplies the estimate (DeepSeek-V3.2, arXiv:2512.02556). That gives the
            gradient of KL(policy || reference) with token ratios; with a ratio a sequence it is an approximation.
    """
    match estimator:
        case "k1":
            kl = k1_kl(logprobs, ref_logprobs, loss_mask)
        case "k2":
            kl = k2_kl(logprobs, ref_logprobs, loss_mask)
        case "k3":
            kl = k3_kl(logprobs, ref_logprobs, loss_mask)
        case _:
            assert_never(estimator)
    return kl if importance_ratio is None else kl * importance_ratio
