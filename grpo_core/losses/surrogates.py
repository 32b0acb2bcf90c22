"""The policy term of each token before masks, weights and reduction: what each loss does with the ratio.

Every function takes one advantage a row and gives a value a token, to be made small. Values where the loss mask is
False mean nothing: the caller drops them.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

VESPO_LOWEST = math.log(1e-8)
VESPO_HIGHEST = 20.0


def clipped_surrogate(
    ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    *,
    clip_range: float,
    clip_range_high: float,
    delta: float | None = None,
) -> Float[Tensor, "batch time"]:
    """-min(min(r, delta) A, clip(r, 1 - clip_range, 1 + clip_range_high) A).

    Shao et al., 2024, GRPO (arXiv:2402.03300), equation 3; the higher upper bound is DAPO's (arXiv:2503.14476,
    equation 10), delta that of INTELLECT-2 (arXiv:2505.07291).

    Args:
        ratio: importance ratio, of a token or of its row.
        advantages: one a row.
        clip_range: the ratio is clipped from below at 1 - clip_range.
        clip_range_high: and from above at 1 + clip_range_high.
        delta: cap on the ratio of the unclipped branch: bounds the loss where A < 0, whose ratio nothing else bounds.
    """
    advantage = advantages.unsqueeze(-1)
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(unclipped * advantage, clipped * advantage)


def clip_flags(
    ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    *,
    clip_range: float,
    clip_range_high: float,
) -> tuple[Bool[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    """Where the bounds of :func:`clipped_surrogate` stop the gradient.

    Returns:
        Lower bound active (r < 1 - clip_range and A < 0), upper bound active (r > 1 + clip_range_high and A > 0).
    """
    advantage = advantages.unsqueeze(-1)
    return (ratio < 1.0 - clip_range) & (advantage < 0), (ratio > 1.0 + clip_range_high) & (advantage > 0)


def cispo_surrogate(
    logprobs: Float[Tensor, "batch time"],
    ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    *,
    ratio_cap: float,
) -> Float[Tensor, "batch time"]:
    """-stopgrad(min(r, ratio_cap)) A logprob: the weight is capped and no token loses its gradient.

    MiniMax, 2025, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5, without a lower bound.
    """
    return -ratio.detach().clamp(max=ratio_cap) * advantages.unsqueeze(-1) * logprobs


def cispo_flags(
    ratio: Float[Tensor, "batch time"], advantages: Float[Tensor, " batch"], *, ratio_cap: float
) -> Bool[Tensor, "batch time"]:
    """Where the cap holds back a token that is to become likelier: r > ratio_cap and A > 0."""
    return (ratio > ratio_cap) & (advantages.unsqueeze(-1) > 0)


def sapo_surrogate(
    ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> Float[Tensor, "batch time"]:
    """-A sigmoid(tau (r - 1)) 4 / tau: a smooth gate whose slope at r = 1 is that of r itself.

    Soft Adaptive Policy Optimization, 2025 (arXiv:2511.20347).

    Args:
        ratio: importance ratio.
        advantages: one a row.
        temperature_pos: tau where A > 0.
        temperature_neg: tau elsewhere; larger, so that unlikely tokens are pushed down less far.
    """
    advantage = advantages.unsqueeze(-1)
    temperature = torch.where(advantage > 0, temperature_pos, temperature_neg).to(ratio.dtype)
    return -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantage


@torch.no_grad()
def vespo_weights(
    log_ratio: Float[Tensor, "batch time"],
    mismatch_weights: Float[Tensor, "batch time"] | None,
    advantages: Float[Tensor, " batch"],
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Float[Tensor, " batch"]:
    """phi(w) = w^k exp(lambda (1 - w)) of each row, w the product of its token ratios; phi(1) = 1.

    VESPO, 2026 (arXiv:2602.10693). Each token's log-ratio is held within +-20 nats, and log w within
    [log 1e-8, 20].

    Args:
        log_ratio: of each token, 0 where masked.
        mismatch_weights: of each token, 1 where masked; they multiply w. None: the sampler is the policy.
        advantages: one a row; k and lambda are those of its sign, 0 counted as positive.
        k_pos: power of w where A >= 0.
        lambda_pos: decay of w where A >= 0.
        k_neg: power of w where A < 0.
        lambda_neg: decay of w where A < 0.
    """
    log_w = log_ratio.clamp(-VESPO_HIGHEST, VESPO_HIGHEST).sum(-1)
    if mismatch_weights is not None:
        log_w = log_w + mismatch_weights.log().clamp(VESPO_LOWEST, VESPO_HIGHEST).sum(-1)
    log_w = log_w.clamp(VESPO_LOWEST, VESPO_HIGHEST)
    k = torch.where(advantages >= 0, k_pos, k_neg).to(log_w.dtype)
    decay = torch.where(advantages >= 0, lambda_pos, lambda_neg).to(log_w.dtype)
    return (decay + k * log_w - decay * log_w.exp()).exp()


def vespo_surrogate(
    logprobs: Float[Tensor, "batch time"], weights: Float[Tensor, " batch"], advantages: Float[Tensor, " batch"]
) -> Float[Tensor, "batch time"]:
    """-phi A logprob, with the rows' constant weights of :func:`vespo_weights`."""
    return -(weights * advantages).unsqueeze(-1) * logprobs
