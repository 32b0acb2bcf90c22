"""Estimates of KL(policy || reference) from one sampled token: k1, k2, k3.

Schulman, 2020, "Approximating KL divergence". As numbers, k1 and k3 are unbiased and k2 is not. As terms of a loss
their gradients on policy differ (Liu et al., 2025, arXiv:2510.01555): that of k1 is zero in expectation, that of k2
is the gradient of KL(policy || reference), that of k3 is the gradient of KL(reference || policy). Multiplied by the
ratio of the policy to whatever sampled the token, k1 and k3 both have the gradient of KL(policy || reference), and
their mean is that KL.
"""

from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.ratios import MAX_LOG_RATIO
from grpo_core.losses.settings import KlEstimator


def estimate_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    estimator: KlEstimator,
    *,
    importance_ratio: Float[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch time"]:
    """Return one estimate per token, in nats, 0 where masked; the gradient reaches `logprobs` and the ratio.

    Args:
        estimator: k1 = logprobs - ref_logprobs, of either sign; k2 = k1^2 / 2 and k3 = exp(-k1) + k1 - 1 are never
            negative. The exponent of k3 is clamped at MAX_LOG_RATIO, without a gradient beyond it.
        importance_ratio: of the policy to the sampler, with gradient; multiplies the estimate (DeepSeek-V3.2,
            arXiv:2512.02556). With bounded ratios, or one per sequence, the KL and its gradient are approximations.
    """
    k1 = torch.where(loss_mask, logprobs - ref_logprobs.detach(), 0.0)
    match estimator:
        case "k1":
            kl = k1
        case "k2":
            kl = k1.square() / 2.0
        case "k3":
            difference = (-k1).clamp(max=MAX_LOG_RATIO)
            kl = torch.expm1(difference) - difference
        case _:
            assert_never(estimator)
    return kl if importance_ratio is None else kl * importance_ratio
