"""Several rewards of a sample become one; a missing reward is never a zero.

A reward that is null for a sample says nothing about it. Counted as zero it would push a good sample to the bottom of
its group. The group's mean in its place leaves the other rewards to decide; renormalising the weights of that sample
alone compares it with its siblings on another scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError

MissingRewards = Literal["group_mean", "renormalize", "drop"]


@dataclass(frozen=True)
class CombinedRewards:
    """The combined reward of each sample, one row a group, one column a sibling.

    Attributes:
        rewards: sum over k of w_k r_k; NaN where `present` is False.
        present: whether the sample has a reward at all.
        known: rewards that were scored, of samples that are present.
        imputed: rewards that were null and have been filled with the group's mean, by sample and reward.
        weights: w_k of each sample; zero where a reward is left out, and for samples that are not present.
    """

    rewards: Float[Tensor, "groups siblings"]
    present: Bool[Tensor, "groups siblings"]
    known: Bool[Tensor, "groups siblings rewards"]
    imputed: Bool[Tensor, "groups siblings rewards"]
    weights: Float[Tensor, "groups siblings rewards"]


def combine_rewards(
    values: Float[Tensor, "groups siblings rewards"],
    weights: Sequence[float],
    *,
    applies: Bool[Tensor, "groups rewards"] | None = None,
    missing: MissingRewards = "group_mean",
) -> CombinedRewards:
    """R = sum over k of w_k r_k, with null rewards treated by group.

    - Not meant for a group: the reward is not there, as if the group had been configured without it.
    - Null for every sample of a group: the reward is left out there, and the other weights are multiplied by
      sum |w| / sum of the remaining |w|, so that the group keeps its scale (weights may be negative).
    - Null for some of a group: see `missing`.
    - A sample whose rewards are all null has none; nothing is imputed. Rewards of weight zero do not count here.

    Args:
        values: NaN marks a null; a group with fewer samples than the others is filled up with NaN rows.
        weights: one a reward, in the order of the last axis.
        applies: whether a reward is meant for a group, however it was scored there; by default all are.
        missing: group_mean: the mean of the group's other samples stands in; renormalize: the other weights of the
            sample grow to the group's sum |w|; drop: the sample has no reward.

    Raises:
        ValueError: another number of weights than rewards, a weight that is not finite, or only zero weights.
        NonFiniteError: a reward is infinite; the sample is named ``group/sibling``.
    """
    weight = torch.tensor(list(weights), dtype=torch.float64, device=values.device)
    if values.ndim != 3 or weight.shape[0] != values.shape[-1]:
        raise ValueError(f"expected [groups, siblings, {weight.shape[0]} rewards], got {list(values.shape)}")
    if not bool(weight.isfinite().all()) or not bool(weight.any()):
        raise ValueError(f"expected finite weights, one of them not zero, got {list(weights)}")
    if applies is None:
        applies = torch.ones_like(values[:, 0], dtype=torch.bool)
    values = torch.where(applies.unsqueeze(1), values, torch.nan)
    infinite = values.isinf().any(-1).nonzero().tolist()
    if infinite:
        raise NonFiniteError("reward", [f"{g}/{s}" for g, s in infinite], "Clamp the reward that produced it.")

    known = ~values.isnan()
    used = (known.any(1) & (weight != 0)).unsqueeze(1).expand_as(known)
    sample_weights = _rescaled(weight, used, among=applies.unsqueeze(1).expand_as(known))
    present = (known & used).any(-1)
    imputed = torch.zeros_like(known)
    match missing:
        case "group_mean":
            imputed = ~known & known.any(1, keepdim=True) & present.unsqueeze(-1)
        case "renormalize":
            sample_weights = _rescaled(sample_weights, known & used, among=used)
        case "drop":
            present = present & (known | ~used).all(-1)
        case _:
            assert_never(missing)
    sample_weights = torch.where(present.unsqueeze(-1), sample_weights, 0.0)
    total = (_filled(values.double(), known) * sample_weights).sum(-1)
    return CombinedRewards(
        rewards=torch.where(present, total, torch.nan).to(values.dtype),
        present=present,
        known=known & present.unsqueeze(-1),
        imputed=imputed,
        weights=sample_weights.to(values.dtype),
    )


def _rescaled(
    weight: Float[Tensor, "... rewards"],
    kept: Bool[Tensor, "groups siblings rewards"],
    *,
    among: Bool[Tensor, "groups siblings rewards"],
) -> Float[Tensor, "groups siblings rewards"]:
    """Weights of `kept`, grown to the sum of magnitudes of those `among`; all zero where nothing is kept."""
    magnitude = torch.where(kept, weight.abs(), 0.0).sum(-1, keepdim=True)
    whole = torch.where(among, weight.abs(), 0.0).sum(-1, keepdim=True)
    return torch.where(kept, weight, 0.0) * torch.where(magnitude > 0, whole / magnitude, 0.0)


def _filled(
    values: Float[Tensor, "groups siblings rewards"], known: Bool[Tensor, "groups siblings rewards"]
) -> Float[Tensor, "groups siblings rewards"]:
    """Values with each null replaced by the mean of the group's known ones, zero where there are none."""
    zeroed = torch.where(known, values, 0.0)
    means = zeroed.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
    return torch.where(known, zeroed, means)
