"""Several rewards of a sample become one; a missing reward is never a zero.

A reward that is null for a sample says nothing about it. Counted as zero it would push a good sample to the bottom of
its group, and renormalising the weights of that sample alone would compare it with its siblings on another scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError


@dataclass(frozen=True)
class CombinedRewards:
    """The combined reward of each sample, one row a group, one column a sibling.

    Attributes:
        rewards: sum over k of w_k r_k; NaN where `present` is False.
        present: whether the sample has a reward at all.
        imputed: rewards that were null and have been filled with the group's mean, by sample and reward.
        weights: the weights that each group was given, after leaving out what was null for the whole group.
    """

    rewards: Float[Tensor, "groups siblings"]
    present: Bool[Tensor, "groups siblings"]
    imputed: Bool[Tensor, "groups siblings rewards"]
    weights: Float[Tensor, "groups rewards"]


def combine_rewards(values: Float[Tensor, "groups siblings rewards"], weights: Sequence[float]) -> CombinedRewards:
    """R = sum over k of w_k r_k, with null rewards treated by group.

    - Null for every sample of a group: the reward is left out there, and the other weights are multiplied by
      sum |w| / sum of the remaining |w|, so that the group keeps its scale (weights may be negative).
    - Null for some of a group: the mean of the group's other samples stands in for it.
    - A sample whose rewards are all null has none; nothing is imputed. Rewards of weight zero do not count here.

    Args:
        values: NaN marks a null; a group with fewer samples than the others is filled up with NaN rows.
        weights: one a reward, in the order of the last axis.

    Raises:
        ValueError: another number of weights than rewards, a weight that is not finite, or only zero weights.
        NonFiniteError: a reward is infinite; the sample is named ``group/sibling``.
    """
    weight = torch.tensor(list(weights), dtype=torch.float64, device=values.device)
    if values.ndim != 3 or weight.shape[0] != values.shape[-1]:
        raise ValueError(f"expected [groups, siblings, {weight.shape[0]} rewards], got {list(values.shape)}")
    if not bool(weight.isfinite().all()) or not bool(weight.any()):
        raise ValueError(f"expected finite weights, one of them not zero, got {list(weights)}")
    infinite = values.isinf().any(-1).nonzero().tolist()
    if infinite:
        raise NonFiniteError("reward", [f"{g}/{s}" for g, s in infinite], "Clamp the reward that produced it.")

    known = ~values.isnan()
    present = (known & (weight != 0)).any(-1)
    group_weights = _renormalised(weight, applies=known.any(1))
    filled, imputed = _impute_group_mean(values.double(), known, present)
    total = (filled * group_weights.unsqueeze(1)).sum(-1)
    return CombinedRewards(
        rewards=torch.where(present, total, torch.nan).to(values.dtype),
        present=present,
        imputed=imputed,
        weights=group_weights.to(values.dtype),
    )


def _renormalised(
    weight: Float[Tensor, " rewards"], *, applies: Bool[Tensor, "groups rewards"]
) -> Float[Tensor, "groups rewards"]:
    """Weights of each group with the same sum of magnitudes as `weight`; all zero where nothing applies."""
    kept = torch.where(applies, weight, 0.0)
    magnitude = kept.abs().sum(-1, keepdim=True)
    scale = torch.where(magnitude > 0, weight.abs().sum() / magnitude, 0.0)
    # Two sums of the same numbers can differ in the last bit; a group without nulls keeps its weights exactly.
    return torch.where(applies.all(-1, keepdim=True), kept, kept * scale)


def _impute_group_mean(
    values: Float[Tensor, "groups siblings rewards"],
    known: Bool[Tensor, "groups siblings rewards"],
    present: Bool[Tensor, "groups siblings"],
) -> tuple[Float[Tensor, "groups siblings rewards"], Bool[Tensor, "groups siblings rewards"]]:
    """Values with each null replaced by its group's mean (zero where the group has none), and which were."""
    zeroed = torch.where(known, values, 0.0)
    counts = known.sum(1, keepdim=True)
    means = zeroed.sum(1, keepdim=True) / counts.clamp(min=1)
    imputed = ~known & (counts > 0) & present.unsqueeze(-1)
    return torch.where(known, zeroed, means), imputed
