"""Masks that leave tokens out of the loss: truncated rows, low entropy, bad samples the policy moved away from."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def overlong_mask(
    loss_mask: Bool[Tensor, "batch time"], finished: Bool[Tensor, " batch"]
) -> Bool[Tensor, "batch time"]:
    """Return the loss mask without the rows that were truncated at their maximum length.

    Yu et al., 2025, DAPO (arXiv:2503.14476), section 3.4, overlong filtering. The rows stay in their groups'
    statistics and in the count of rows; they leave the count of tokens.
    """
    return loss_mask & finished.unsqueeze(-1)


def entropy_threshold(entropies: Float[Tensor, " tokens"], share: float) -> float:
    """Return the entropy that `share` of the tokens reach: their (1 - share) quantile, interpolated linearly.

    Wang et al., 2025, "Beyond the 80/20 rule" (arXiv:2506.01939). Computed once over the trained tokens of the
    minibatch, on all processes, the threshold does not depend on the microbatches.

    Args:
        entropies: one per trained token, nats.
        share: part of the tokens to keep, in (0, 1].

    Raises:
        ValueError: share is not in (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share is {share}; it is the part of the tokens to keep, in (0, 1]")
    if not entropies.numel():
        return 0.0
    return float(torch.quantile(entropies.detach(), 1.0 - share))


def high_entropy_mask(
    entropy: Float[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"], *, threshold: float
) -> Bool[Tensor, "batch time"]:
    """Return the trained tokens whose entropy is at least the threshold of :func:`entropy_threshold`."""
    return loss_mask & (entropy.detach() >= threshold)


def on_policy_rows(
    logprobs: Float[Tensor, "batch time"],
    sampling_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    threshold: float,
) -> Bool[Tensor, " batch"]:
    """Return False for rows with A < 0 whose mean (sampling - current) log-prob exceeds the threshold.

    DeepSeek-V3.2 (arXiv:2512.02556), equation 9, off-policy sequence masking: a bad sample that the policy would
    rarely sample again teaches little and destabilises.

    Args:
        logprobs: under the policy that is being trained.
        sampling_logprobs: as recorded while sampling.
        advantages: one per row.
        loss_mask: True for a trained token.
        threshold: nats per token.
    """
    difference = torch.where(loss_mask, sampling_logprobs - logprobs, 0.0).detach()
    drift = difference.sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return ~((advantages < 0) & (drift > threshold))
