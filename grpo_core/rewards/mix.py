"""Several rewards of a sample become one; the running mean and spread of each reward.

A null reward says nothing about a sample. As zero, TRL's choice, it would push a good sample to the bottom of its
group; the group's mean in its place leaves the other rewards to decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.rewards.registry import MissingRewards, RewardTerm


@dataclass(frozen=True)
class CombinedRewards:
    """The combined reward of each sample, one row a group, one column a sibling.

    Attributes:
        rewards: sum over k of w_k s_k, times the gates; NaN where `present` is False.
        present: whether the sample has a reward at all.
        known: rewards that were scored, of samples that are present.
        imputed: rewards that count, were null and have been filled with the group's mean.
        weights: w_k of each sample; zero where a reward is left out, for gates, and for samples that are not present.
        scaled: s_k (`scaled_values`), of a gate its factor; imputed ones filled; NaN where there is none.
        gated: s_k times the gates of the sample: what the weights multiply. Never NaN.
    """

    rewards: Float[Tensor, "groups siblings"]
    present: Bool[Tensor, "groups siblings"]
    known: Bool[Tensor, "groups siblings rewards"]
    imputed: Bool[Tensor, "groups siblings rewards"]
    weights: Float[Tensor, "groups siblings rewards"]
    scaled: Float[Tensor, "groups siblings rewards"]
    gated: Float[Tensor, "groups siblings rewards"]


def combine_rewards(
    values: Float[Tensor, "groups siblings rewards"],
    terms: Sequence[RewardTerm],
    *,
    applies: Bool[Tensor, "groups rewards"] | None = None,
    missing: MissingRewards = "group_mean",
) -> CombinedRewards:
    """Compute R = (sum over k of w_k s_k) x (product of the gates), with null rewards treated by group.

    - Not meant for a group: the reward is not there, as if the group had been configured without it.
    - Null for every sample of a group: the reward is left out there, and the other weights are multiplied by
      sum |w| / sum of the remaining |w|, so that the group keeps its scale; with zero they stay as they are. A gate
      that is left out multiplies by 1.
    - Null for some of a group: group_mean: the mean of the group's other samples stands in, of a gate that of its
      factors; renormalize: the other weights of the sample grow to the group's sum |w|, and a gate is left out; drop:
      the sample has no reward; zero: a null adds nothing, and a gate is left out, as in TRL.
    - A sample whose rewards that add, with a weight, are all null has none; nothing is imputed.

    Args:
        values: NaN marks a null; a group with fewer samples than the others is filled up with NaN rows.
        terms: one per reward, in the order of the last axis.
        applies: whether a reward is meant for a group, however it was scored there; by default all are.

    Raises:
        ValueError: another number of terms than rewards, or no reward that adds with a weight other than zero.
        NonFiniteError: a reward is infinite; the sample is named ``group/sibling``.
    """
    weight, gate = _roles(values, terms)
    if applies is None:
        applies = torch.ones_like(values[:, 0], dtype=torch.bool)
    values = torch.where(applies.unsqueeze(1), values, torch.nan)
    _refuse_infinite(values)
    scaled = scaled_values(values.double(), terms)
    known = ~scaled.isnan()
    used = (known.any(1) & ((weight != 0) | gate)).unsqueeze(1).expand_as(known)
    weights, present, imputed = _treat_missing(weight, known, used, applies, missing)
    filled = _filled(scaled, known)
    factors = torch.where(gate & (known | imputed), filled, 1.0).prod(-1, keepdim=True)
    gated = filled * factors
    return CombinedRewards(
        rewards=torch.where(present, (gated * weights).sum(-1), torch.nan).to(values.dtype),
        present=present,
        known=known & present.unsqueeze(-1),
        imputed=imputed,
        weights=weights.to(values.dtype),
        scaled=torch.where(known | imputed, filled, torch.nan).to(values.dtype),
        gated=gated.to(values.dtype),
    )


def _roles(
    values: Float[Tensor, "groups siblings rewards"], terms: Sequence[RewardTerm]
) -> tuple[Float[Tensor, " rewards"], Bool[Tensor, " rewards"]]:
    """Return the weight of each reward, zero for a gate, and which are gates."""
    if values.ndim != 3 or len(terms) != values.shape[-1]:
        raise ValueError(f"expected [groups, siblings, {len(terms)} rewards], got {list(values.shape)}")
    gate = torch.tensor([term.role == "gate" for term in terms], device=values.device)
    weight = torch.tensor([term.weight for term in terms], dtype=torch.float64, device=values.device)
    weight = torch.where(gate, 0.0, weight)
    if not bool(weight.any()):
        raise ValueError(f"expected a reward that adds, with a weight other than zero, got {list(terms)}")
    return weight, gate


def _refuse_infinite(values: Float[Tensor, "groups siblings rewards"]) -> None:
    """Refuse infinities before any clamp: they are an error of the reward, not a large value."""
    infinite = values.isinf().any(-1).nonzero().tolist()
    if infinite:
        hint = "A reward gives finite numbers; fix the one that produced it."
        raise NonFiniteError("reward", [f"{g}/{s}" for g, s in infinite], hint)


def _treat_missing(
    weight: Float[Tensor, " rewards"],
    known: Bool[Tensor, "groups siblings rewards"],
    used: Bool[Tensor, "groups siblings rewards"],
    applies: Bool[Tensor, "groups rewards"],
    missing: MissingRewards,
) -> tuple[
    Float[Tensor, "groups siblings rewards"], Bool[Tensor, "groups siblings"], Bool[Tensor, "groups siblings rewards"]
]:
    """Return the weights of each sample, which samples are present, and which nulls take the group's mean.

    `used` are rewards that count in the group: known for one of its samples, and a gate or with a weight.
    """
    if missing == "zero":
        weights = torch.where(known & used, weight, 0.0)
    else:
        weights = _rescaled(weight, used, among=applies.unsqueeze(1).expand_as(known))
    present = (known & used & (weight != 0)).any(-1)
    imputed = torch.zeros_like(known)
    match missing:
        case "group_mean":
            imputed = ~known & used & present.unsqueeze(-1)
        case "renormalize":
            weights = _rescaled(weights, known & used, among=used)
        case "drop":
            present = present & (known | ~used).all(-1)
        case "zero":
            pass
        case _:
            assert_never(missing)
    return torch.where(present.unsqueeze(-1), weights, 0.0), present, imputed


def _rescaled(
    weight: Float[Tensor, "... rewards"],
    kept: Bool[Tensor, "groups siblings rewards"],
    *,
    among: Bool[Tensor, "groups siblings rewards"],
) -> Float[Tensor, "groups siblings rewards"]:
    """Scale the weights of `kept` to the sum of magnitudes of those `among`; all zero where nothing is kept."""
    magnitude = torch.where(kept, weight.abs(), 0.0).sum(-1, keepdim=True)
    total = torch.where(among, weight.abs(), 0.0).sum(-1, keepdim=True)
    return torch.where(kept, weight, 0.0) * torch.where(magnitude > 0, total / magnitude, 0.0)


def _filled(
    values: Float[Tensor, "groups siblings rewards"], known: Bool[Tensor, "groups siblings rewards"]
) -> Float[Tensor, "groups siblings rewards"]:
    """Replace each null by the mean of the group's known values, zero where there are none."""
    zeroed = torch.where(known, values, 0.0)
    means = zeroed.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
    return torch.where(known, zeroed, means)


def scaled_values(
    values: Float[Tensor, "*samples rewards"], terms: Sequence[RewardTerm]
) -> Float[Tensor, "*samples rewards"]:
    """Clamp the values, then apply the fixed range; a gate's factor is at least 0. NaN stays NaN."""
    assert values.shape[-1] == len(terms), f"one term a reward, got {len(terms)} for {values.shape[-1]}"
    return torch.stack([_scaled(values[..., index], term) for index, term in enumerate(terms)], -1)


def _scaled(values: Float[Tensor, "*samples"], term: RewardTerm) -> Float[Tensor, "*samples"]:
    if term.threshold is not None:
        # Scores are computed in fp32, where .7 may lie below .7 of fp64.
        passed = values.float() >= torch.tensor(term.threshold, dtype=torch.float32, device=values.device)
        return torch.where(values.isnan(), torch.nan, passed.to(values.dtype))
    if term.clamp is not None:
        values = values.clamp(*term.clamp)
    if term.range is not None:
        low, high = term.range
        values = (values - low) / (high - low)
    return values.clamp(min=0.0) if term.role == "gate" else values


ROUNDING = 1e-12
"""Relative to the mean: what equal values differ by after their deviations are added up in fp64 is below it."""


@dataclass(frozen=True)
class RunningMoments:
    """Moments of the scaled values, one entry per reward; plain numbers, exact as JSON.

    However the values are cut into calls, the merged moments are the same within rounding. `squares` are the sums of
    the squared deviations from the means, all 0 where no value was known.
    """

    counts: tuple[int, ...]
    means: tuple[float, ...]
    squares: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.counts), len(self.means), len(self.squares)}
        assert len(sizes) == 1, f"one entry per reward in every field, got {sizes}"

    @classmethod
    def empty(cls, rewards: int) -> "RunningMoments":
        """Return the moments of no values."""
        return cls((0,) * rewards, (0.0,) * rewards, (0.0,) * rewards)

    @classmethod
    def of(cls, values: Float[Tensor, "... rewards"]) -> "RunningMoments":
        """Return the moments of these values, in fp64; NaN values do not count."""
        rows = values.double().reshape(-1, values.shape[-1])
        known = ~rows.isnan()
        counts = known.sum(0)
        means = torch.where(known, rows, 0.0).sum(0) / counts.clamp(min=1)
        squares = torch.where(known, rows - means, 0.0).square().sum(0)
        return cls(tuple(counts.tolist()), tuple(means.tolist()), tuple(squares.tolist()))

    def merged(self, other: "RunningMoments") -> "RunningMoments":
        """Return the moments of the values of both; ValueError for different numbers of rewards.

        Chan, Golub and LeVeque, 1979, Updating formulae and a pairwise algorithm for computing sample variances
        (STAN-CS-79-773), section 2, written with means in place of sums.
        """
        if len(self.counts) != len(other.counts):
            raise ValueError(f"moments of {len(self.counts)} rewards and of {len(other.counts)} cannot be merged")
        pairs = zip(self._entries(), other._entries(), strict=True)
        merged = [_merged(one, another) for one, another in pairs]
        return RunningMoments(
            tuple(count for count, _, _ in merged),
            tuple(mean for _, mean, _ in merged),
            tuple(square for _, _, square in merged),
        )

    @property
    def stds(self) -> tuple[float, ...]:
        """Bessel-corrected; exactly 0 with fewer than two values, and where they do not differ beyond rounding."""
        return tuple(_std(count, mean, square) for count, mean, square in self._entries())

    def _entries(self) -> list[tuple[int, float, float]]:
        return list(zip(self.counts, self.means, self.squares, strict=True))


def _merged(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[int, float, float]:
    (count, mean, square), (other_count, other_mean, other_square) = one, other
    if count == 0 or other_count == 0:
        return other if count == 0 else one
    total = count + other_count
    apart = other_mean - mean
    share = other_count / total
    return total, mean + apart * share, square + other_square + apart * apart * count * share


def _std(count: int, mean: float, square: float) -> float:
    if count < 2:
        return 0.0
    std = math.sqrt(square / (count - 1))
    return std if std > ROUNDING * abs(mean) else 0.0
