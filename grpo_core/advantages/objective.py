"""The number that siblings are compared by: the sum of their rewards, each normalised as its term says.

n_k is the reward, or (reward - mean) / standard deviation. The gates multiply before that, while 0 is
still the lowest possible reward. Afterwards 0 is the average, and a gate of 0 would lift a sample above half of its
siblings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.advantages.moments import moments_of
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.mix.combine import CombinedRewards
from grpo_core.rewards.mix.running import RunningMoments
from grpo_core.rewards.mix.terms import Normalization, RewardTerm


@dataclass(frozen=True)
class Objective:
    """S = sum over k of w_k n_k, for the samples that are present.

    Attributes:
        sums: S; the combined rewards where nothing is normalised.
        magnitudes: sum of the magnitudes of the summands: rounding is relative to it.
    """

    sums: Float[Tensor, "groups siblings"]
    magnitudes: Float[Tensor, "groups siblings"]


def objective_of(
    combined: CombinedRewards, terms: Sequence[RewardTerm], settings: AdvantageSettings, running: RunningMoments
) -> Objective:
    """Normalise each reward as its term says (`normalize_then_sum`: all of them by group), and sum.

    A standard deviation of zero is not divided by.

    Args:
        combined: rewards by reward, scaled and gated.
        terms: one per reward.
        settings: aggregation and eps.
        running: of the scaled values, this call's among them.
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
    return Objective(
        sums=(combined.weights * normalised).sum(-1),
        magnitudes=(combined.weights * (gated.abs() + means.abs()) / divisors).abs().sum(-1),
    )


def _group_moments(
    combined: CombinedRewards,
) -> tuple[Float[Tensor, "groups 1 rewards"], Float[Tensor, "groups 1 rewards"]]:
    """Return mean and standard deviation of each reward over the group's known values, gates included."""
    groups, _, rewards = combined.gated.shape
    rows, known = (values.transpose(1, 2).flatten(0, 1) for values in (combined.gated, combined.known))
    each = moments_of(rows, known)
    return each.means.view(groups, 1, rewards), each.stds.view(groups, 1, rewards)
