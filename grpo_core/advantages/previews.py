"""Groups whose seeds were chosen by cheap previews: which ones, and how far the previews' ranks can be trusted.

The best and worst of many previews are made again with all steps and trained (Sol-RL, arXiv:2604.06916). A preview's
value says nothing of the full image's, only its rank does. docs/algorithm.md says what standardising such a group does.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def select_extremes(values: Float[Tensor, " siblings"], best: int, worst: int) -> list[int]:
    """Return the indices of the highest and lowest values, ascending; of equal values the first are the higher ones.

    NaN is chosen only where fewer other values are left than wanted.
    """
    descending = values.argsort(descending=True, stable=True).tolist()
    unknown = set(values.isnan().nonzero().flatten().tolist())
    known = [index for index in descending if index not in unknown]
    ordered = [*known[:best], *sorted(unknown), *known[best:]]
    return sorted({*ordered[:best], *ordered[len(ordered) - worst :]})


def average_ranks(values: Float[Tensor, "*rows siblings"]) -> Float[Tensor, "*rows siblings"]:
    """Return each value's rank in its row, 1 the lowest, in fp64; equal values share their mean rank, NaN has NaN."""
    below = (values.unsqueeze(-2) < values.unsqueeze(-1)).double().sum(-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).double().sum(-1)
    return torch.where(values.isnan(), torch.nan, below + (equal + 1) / 2)


def rank_correlation(
    ranks: Float[Tensor, "groups kept"], values: Float[Tensor, "groups kept"], count: int
) -> Float[Tensor, " groups"]:
    """Estimate Spearman's correlation of previews and full images over all `count` previews of each group.

    Only the kept seeds have full images. Over these alone the correlation is too high, because the previews of the best
    and the worst are further apart than those of all: 0.74 where it is 0.57 for 4 and 4 of 32. As the previews' ranks
    are known for all, their variances correct it (Thorndike, 1949, case 2): with u^2 the variance of the kept ranks
    over that of all, r / sqrt(u^2 (1 - r^2) + r^2).

    Args:
        ranks: of the previews among all of their group, 1 the best.
        values: of the full images, higher is better.

    Returns:
        NaN for a group with a NaN, or without a difference in either.
    """
    ours, theirs = average_ranks(-ranks), average_ranks(values)
    ours, theirs = ours - ours.mean(-1, keepdim=True), theirs - theirs.mean(-1, keepdim=True)
    # A group without a difference has a norm of 0, and 0 / 0 is NaN.
    kept: Tensor = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
    # Equal previews have less of a difference than the formula knows.
    wider = (ranks.double().var(-1, correction=0) / ((count**2 - 1) / 12)).clamp(min=1)
    return kept / (wider * (1 - kept.square()) + kept.square()).sqrt()
