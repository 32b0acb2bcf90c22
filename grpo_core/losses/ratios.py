"""Importance ratios of the trained policy to the policy before the update, and weights that correct for the sampler.

The sampler is not quite that policy: they differ by arithmetic (another engine, dtype or kernel), or the rollouts are
older. exp(old - rollout) is truncated (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
training", TIS) or masked (IcePop, in "Every step evolves", 2025, arXiv:2510.18855).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.settings import ImportanceLevel, MismatchSettings

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
    """Return the log-ratios at a level: as given, or the mean over each row's tokens at every place of the row.

    The mean is the length-th root of the sequence's ratio (Zheng et al., 2025, GSPO, arXiv:2507.18071, equation 7);
    it is 0 for a row without tokens.
    """
    if level == "token":
        return log_ratio
    lengths = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    total = torch.where(loss_mask, log_ratio, 0.0).sum(-1, keepdim=True)
    return (total / lengths).expand_as(log_ratio)


def importance_ratio(log_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Return exp of the log-ratio, which is clamped to +-MAX_LOG_RATIO; there is no gradient beyond the bound.

    Without the bound a single token whose policy moved far makes the loss of the whole minibatch infinite.
    """
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
    """Return the weights of the policy term and of the KL, 1 where masked.

    At sequence level all tokens of a row have the row's.
    """
    log_ratio = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if settings.level == "sequence":
        log_ratio = torch.where(loss_mask, log_ratio.sum(-1, keepdim=True), 0.0)
    ratio = log_ratio.exp()
    if settings.mode == "truncate":
        return ratio.clamp(settings.floor, settings.cap)
    return torch.where((ratio < settings.floor) | (ratio > settings.cap), 0.0, ratio)


def mismatch_metrics(
    weights: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"], level: ImportanceLevel
) -> dict[str, float]:
    """Return min, mean and max of the weights of :func:`mismatch_weights`, named as by TRL.

    At sequence level each row counts once, whatever its length.
    """
    # The first trained token's weight is the row's; that of a row without tokens is 1.
    first = loss_mask.int().argmax(-1, keepdim=True)
    counted = (weights[loss_mask] if level == "token" else weights.gather(1, first)).double()
    statistics = {"min": counted.min(), "mean": counted.mean(), "max": counted.max()}
    return {f"sampling/importance_sampling_ratio/{name}": float(value) for name, value in statistics.items()}
