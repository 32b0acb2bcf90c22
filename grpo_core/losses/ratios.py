"""Importance ratios, weights that correct for the sampler, and estimates of the KL to the reference.

The sampler differs from the policy by arithmetic, or the rollouts are older: exp(old - rollout) is truncated (Yao et
al., 2025, "Your efficient RL framework secretly brings you off-policy RL training", TIS) or masked (IcePop, in "Every
step evolves", 2025, arXiv:2510.18855).

Schulman, 2020, "Approximating KL divergence". As numbers, k1 and k3 are unbiased and k2 is not. As terms of a loss
their gradients on policy differ (Liu et al., 2025, arXiv:2510.01555): that of k1 is zero in expectation, that of k2
is the gradient of KL(policy || reference), that of k3 is the gradient of KL(reference || policy). Multiplied by the
ratio of the policy to whatever sampled the token, k1 and k3 have the mean and the gradient of KL(policy || reference).
"""

from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.settings import ImportanceLevel, KlEstimator, MismatchSettings

MAX_LOG_RATIO = 20.0
"""Nats; exp overflows fp32 beyond 88. TRL uses the same bound where it has one."""


def token_log_ratio(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Return logprobs - old_logprobs in nats, 0 where masked. The gradient reaches `logprobs` only."""
    return torch.where(loss_mask, logprobs - old_logprobs.detach(), 0.0)


def log_ratio_at(
    log_ratio: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"], level: ImportanceLevel
) -> Float[Tensor, "batch time"]:
    """Return the log-ratios at a level: as given, or the mean over each row's tokens, 0 for a row without, everywhere.

    The mean is the length-th root of the sequence's ratio (Zheng et al., 2025, GSPO, arXiv:2507.18071, equation 7).
    """
    if level == "token":
        return log_ratio
    lengths = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    total = torch.where(loss_mask, log_ratio, 0.0).sum(-1, keepdim=True)
    return (total / lengths).expand_as(log_ratio)


def importance_ratio(log_ratio: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return exp of the log-ratio, clamped to +-MAX_LOG_RATIO without a gradient beyond, or one token could be inf."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_clamped(log_ratio: Float[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """Return where :func:`importance_ratio` clamps."""
    return log_ratio.detach().abs() > MAX_LOG_RATIO


@torch.no_grad()
def mismatch_weights(
    old_logprobs: Float[Tensor, "batch time"],
    rollout_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    settings: MismatchSettings,
) -> Float[Tensor, "batch time"]:
    """Return the weights of the policy term and of the KL, 1 where masked; at sequence level a row has one."""
    log_ratio = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if settings.level == "sequence":
        log_ratio = torch.where(loss_mask, log_ratio.sum(-1, keepdim=True), 0.0)
    ratio = log_ratio.exp()
    if settings.mode == "truncate":
        return ratio.clamp(settings.floor, settings.cap)
    return torch.where((ratio < settings.floor) | (ratio > settings.cap), 0.0, ratio)


def counted_weights(
    weights: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"], level: ImportanceLevel
) -> Float[Tensor, " counted"]:
    """Return the weights of :func:`mismatch_weights` of the tokens, or of the rows at sequence level."""
    # The first trained token's weight is the row's; that of a row without tokens is 1.
    first = loss_mask.int().argmax(-1, keepdim=True)
    return weights[loss_mask] if level == "token" else weights.gather(1, first).squeeze(1)


def mismatch_metrics(counted: Float[Tensor, " counted"]) -> dict[str, float]:
    """Return min, mean and max of :func:`counted_weights`, named as by TRL."""
    counted = counted.double()
    statistics = {"min": counted.min(), "mean": counted.mean(), "max": counted.max()}
    return {f"sampling/importance_sampling_ratio/{name}": float(value) for name, value in statistics.items()}


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
