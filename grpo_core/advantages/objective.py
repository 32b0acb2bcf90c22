"""The number that siblings are compared by: the sum of their rewards, each normalised as its term says.

n_k is the reward, or (reward - mean) / standard deviation. The gates multiply before that, while 0 is
still the lowest possible reward. Afterwards 0 is the average, and a gate of 0 would lift a sample above half of its
siblings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.mix.combine import CombinedRewards
from grpo_core.rewards.mix.running import RunningMoments
from grpo_core.rewards.mix.terms import Normalization, RewardTerm

ROUNDING = 1e-12
"""Relative to the values: sums of the same rewards in another order differ by less, in fp64."""


@dataclass(frozen=True)
class Moments:
    """Statistics of each row over its counted values.

    Attributes:
        counts: how many values count.
        means: zero for a row without counted values.
        stds: Bessel-corrected; exactly zero for a constant row.
        centred: value - mean; exactly zero in a constant row and where a value does not count.
        constant: fewer than two values count, or they do not differ beyond rounding.
    """

    counts: Int[Tensor, " rows"]
    means: Float[Tensor, " rows"]
    stds: Float[Tensor, " rows"]
    centred: Float[Tensor, "rows columns"]
    constant: Bool[Tensor, " rows"]


def moments_of(
    values: Float[Tensor, "rows columns"],
    counted: Bool[Tensor, "rows columns"],
    *,
    magnitudes: Float[Tensor, "rows columns"] | None = None,
) -> Moments:
    """Compute the moments of each row in fp64; values where `counted` is False are ignored.

    Args:
        magnitudes: for values that are sums: of the magnitudes of what was added, which bounds the rounding where it
            cancels; by default |value|.
    """
    zeroed = torch.where(counted, values, 0.0).double()
    counts = counted.sum(-1)
    means = zeroed.sum(-1) / counts.clamp(min=1)
    highest = torch.where(counted, zeroed, -torch.inf).amax(-1)
    lowest = torch.where(counted, zeroed, torch.inf).amin(-1)
    largest = torch.where(counted, zeroed.abs() if magnitudes is None else magnitudes, 0.0).amax(-1)
    # Not by the deviations: the mean of equal numbers can differ from them in the last bit.
    constant = (counts < 2) | (highest - lowest <= ROUNDING * largest)
    centred = torch.where(counted & ~constant.unsqueeze(-1), zeroed - means.unsqueeze(-1), 0.0)
    stds = (centred.square().sum(-1) / (counts - 1).clamp(min=1)).sqrt()
    return Moments(counts, means, stds, centred, constant)


def objective_of(
    combined: CombinedRewards, terms: Sequence[RewardTerm], settings: AdvantageSettings, running: RunningMoments
) -> tuple[Float[Tensor, "groups siblings"], Float[Tensor, "groups siblings"]]:
    """Normalise each reward as its term says (`normalize_then_sum`: all of them by group), and sum.

    A standard deviation of zero is not divided by.

    Returns:
        S = sum over k of w_k n_k of the samples that are present, which is the combined reward where nothing is
        normalised; and the sum of the magnitudes of the summands, to which rounding is relative.
    """
    whole_mix = settings.aggregation == "normalize_then_sum"
    kinds: list[Normalization] = ["group" if whole_mix else term.normalize for term in terms]
    gated = combined.gated
    by_group = torch.tensor([kind == "group" for kind in kinds], device=gated.device)
    by_run = torch.tensor([kind == "running" for kind in kinds], device=gated.device)
    group_means, group_stds = _group_moments(combined)
    means = torch.where(by_group, group_means, torch.where(by_run, gated.new_tensor(running.means), 0.0))
    stds = torch.where(by_group, group_stds, torch.where(by_run, gated.new_tensor(running.stds), 0.0))
    divisors = torch.where(stds > 0, stds + settings.eps, 1.0)
    normalised = (gated - means) / divisors
    sums = (combined.weights * normalised).sum(-1)
    return sums, (combined.weights * (gated.abs() + means.abs()) / divisors).abs().sum(-1)


def _group_moments(
    combined: CombinedRewards,
) -> tuple[Float[Tensor, "groups 1 rewards"], Float[Tensor, "groups 1 rewards"]]:
    """Return mean and standard deviation of each reward over the group's known values, gates included."""
    groups, _, rewards = combined.gated.shape
    rows, known = (values.transpose(1, 2).flatten(0, 1) for values in (combined.gated, combined.known))
    each = moments_of(rows, known)
    return each.means.view(groups, 1, rewards), each.stds.view(groups, 1, rewards)
