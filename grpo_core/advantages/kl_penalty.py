"""KL to the reference as part of the reward."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.kl import KlEstimator, estimate_kl


def kl_penalty(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    estimator: KlEstimator,
) -> Float[Tensor, " batch"]:
    """Sum of the estimator over the trained tokens of each row, in nats, fp64.

    With k1 that is log p(row) - log ref(row), whose mean over samples is the KL of whole sequences (Ouyang et al.,
    2022, arXiv:2203.02155, equation 2). It is summed, not averaged: a longer row has diverged more.

    Args:
        logprobs: under the policy that sampled, computed as the reference's were.
        ref_logprobs: under the reference.
        loss_mask: True for a trained token; other values are ignored.
        estimator: k1, k2 or k3.
    """
    return estimate_kl(logprobs, ref_logprobs, loss_mask, estimator).detach().sum(-1, dtype=torch.float64)
