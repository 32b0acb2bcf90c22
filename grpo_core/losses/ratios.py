"""How much likelier the trained policy makes what was sampled: a ratio a token, or one a sequence."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ImportanceLevel = Literal["token", "sequence"]


def token_log_ratio(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The difference logprobs - old_logprobs, nats; 0 where masked. The gradient reaches `logprobs` alone."""
    return torch.where(loss_mask, logprobs - old_logprobs.detach(), 0.0)


def sequence_log_ratio(
    log_ratio: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """The mean of each row's token log-ratios, at every place of the row; 0 for a row without tokens.

    Zheng et al., 2025, GSPO (arXiv:2507.18071), equation 7: the length-th root of the sequence's ratio.
    """
    lengths = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    total = torch.where(loss_mask, log_ratio, 0.0).sum(-1, keepdim=True)
    return (total / lengths).expand_as(log_ratio)


def importance_ratio(
    log_ratio: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"], level: ImportanceLevel
) -> Float[Tensor, "batch time"]:
    """The ratio itself, exp of the log-ratio, at one level; differentiable.

    Args:
        log_ratio: of each token, as :func:`token_log_ratio` gives it.
        loss_mask: True for a trained token.
        level: "token", or "sequence" for one ratio a row (GSPO).
    """
    if level == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, loss_mask)
    return log_ratio.exp()
