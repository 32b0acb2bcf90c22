"""The GRPO loss: clipped surrogate per token, k3 KL to the reference, an explicit masked reduction.

Shao et al., 2024 (arXiv:2402.03300), equations 3 and 4; Schulman, 2020, "Approximating KL divergence", for k3.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Per-token terms of the loss before any reduction; every field is zero (False) where masked.

    Attributes:
        surrogate: -min(r A, clip(r, 1 - low, 1 + high) A).
        kl: k3 estimate of KL(policy || reference), never negative; all zero without a reference.
        importance_ratio: r = exp(logprobs - old_logprobs).
        clipped_low: the lower bound is active: r < 1 - low and A < 0.
        clipped_high: the upper bound is active: r > 1 + high and A > 0.
    """

    surrogate: Float[Tensor, "batch time"]
    kl: Float[Tensor, "batch time"]
    importance_ratio: Float[Tensor, "batch time"]
    clipped_low: Bool[Tensor, "batch time"]
    clipped_high: Bool[Tensor, "batch time"]


def clipped_surrogate(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    clip_range: float,
    clip_range_high: float,
) -> TokenLoss:
    """The surrogate of each token (its KL is left at zero).

    Args:
        logprobs: under the policy that is being trained.
        old_logprobs: under the policy before the update; a constant.
        advantages: one a row.
        loss_mask: True for a trained token.
        clip_range: the ratio is clipped from below at 1 - clip_range.
        clip_range_high: and from above at 1 + clip_range_high.
    """
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs.detach(), 0.0)
    ratio = log_ratio.exp()
    advantage = advantages.unsqueeze(-1)
    low, high = 1.0 - clip_range, 1.0 + clip_range_high
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return TokenLoss(
        surrogate=torch.where(loss_mask, surrogate, 0.0),
        kl=torch.zeros_like(log_ratio),
        importance_ratio=torch.where(loss_mask, ratio, 0.0).detach(),
        clipped_low=(ratio < low) & (advantage < 0) & loss_mask,
        clipped_high=(ratio > high) & (advantage > 0) & loss_mask,
    )


def k3_kl(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """exp(ref - lp) - (ref - lp) - 1: unbiased for KL(policy || reference) and never negative."""
    difference = torch.where(loss_mask, ref_logprobs.detach() - logprobs, 0.0)
    return torch.expm1(difference) - difference


def mean_of_row_means(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, rows: int
) -> Float[Tensor, ""]:
    """Sum over rows of (sum of the row's masked values / the row's masked length), divided by `rows`.

    `rows` is the number of rows of the whole minibatch, not of this microbatch: microbatch losses then add up to
    the minibatch's, however it was split. A row without a masked token contributes zero.
    """
    lengths = mask.sum(-1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(-1) / lengths).sum() / rows


def compute_grpo_loss(
    logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    clip_range: float,
    clip_range_high: float,
    kl_coef: float = 0.0,
    ref_logprobs: Float[Tensor, "batch time"] | None = None,
    rows: int | None = None,
) -> tuple[Float[Tensor, ""], TokenLoss]:
    """Surrogate + kl_coef * KL, mean over rows of the mean over each row's tokens.

    Args:
        logprobs: with gradients, under the policy that is being trained.
        old_logprobs: under the policy before the update.
        advantages: one a row.
        loss_mask: True for a trained token.
        clip_range: lower clip of the ratio, 1 - clip_range.
        clip_range_high: upper clip of the ratio, 1 + clip_range_high.
        kl_coef: weight of the KL; it is added after clipping.
        ref_logprobs: under the reference; needed when kl_coef > 0, and reported when given.
        rows: rows of the whole minibatch, when this is one microbatch of it; by default this batch's rows.

    Raises:
        ValueError: kl_coef > 0 without ref_logprobs.
    """
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef} but there are no ref_logprobs; give the reference's, or set it to 0")
    tokens = clipped_surrogate(
        logprobs, old_logprobs, advantages, loss_mask, clip_range=clip_range, clip_range_high=clip_range_high
    )
    per_token = tokens.surrogate
    if ref_logprobs is not None:
        kl = k3_kl(logprobs, ref_logprobs, loss_mask)
        per_token = per_token + kl_coef * kl
        tokens = TokenLoss(tokens.surrogate, kl, tokens.importance_ratio, tokens.clipped_low, tokens.clipped_high)
    loss = mean_of_row_means(per_token, loss_mask, rows=rows or logprobs.shape[0])
    return loss, tokens
