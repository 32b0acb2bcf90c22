"""How much was clipped, counted as dashboards that know TRL expect it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.policy_loss import TokenLoss
from grpo_core.losses.ratios import ImportanceLevel


@dataclass(frozen=True)
class ClipCounts:
    """Counts that add up over microbatches and processes; a share is clipped / counted.

    Attributes:
        low: where the lower bound is active.
        high: where the upper bound is active.
        counted: tokens; at sequence level rows, those without trained tokens included.
    """

    low: int
    high: int
    counted: int


def count_clipped(terms: TokenLoss, loss_mask: Bool[Tensor, "batch time"], level: ImportanceLevel) -> ClipCounts:
    """Clipped tokens of a microbatch, or its clipped rows where a row has one ratio."""
    if level == "sequence":
        low, high = terms.clipped_low.any(-1), terms.clipped_high.any(-1)
        return ClipCounts(int(low.sum()), int(high.sum()), len(loss_mask))
    return ClipCounts(int(terms.clipped_low.sum()), int(terms.clipped_high.sum()), int(loss_mask.sum()))


def clipped_share_of_rows(
    clipped: Bool[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, " batch"]:
    """Each row's share of clipped tokens; NaN for a row without trained tokens."""
    lengths = loss_mask.sum(-1)
    shares = (clipped & loss_mask).sum(-1) / lengths.clamp(min=1)
    return torch.where(lengths > 0, shares, torch.nan)
