"""Importance ratios of the trained policy to the policy that sampled: one per token, or one per sequence."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ImportanceLevel = Literal["token", "sequence"]

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

    Args:
        log_ratio: of each token, from :func:`token_log_ratio`.
        loss_mask: True for a trained token.
        level: "token" or "sequence".
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
