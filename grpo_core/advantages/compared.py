"""Which samples of a prompt are compared to train a stream, and the number that they are compared by.

Tokens decide between the drafts of a prompt and denoising steps between the renderings of one draft; a comparison of
both would give the denoising steps no signal. So samples can be uneven: many drafts, a few rendered several times.

n_k is the reward, or (reward - mean) / standard deviation. The gates multiply before that, while 0 is still the lowest
possible reward: afterwards 0 is the average, and a gate of 0 would lift a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.mix import CombinedRewards, RunningMoments
from grpo_core.rewards.registry import Normalization, RewardTerm
from grpo_core.rollouts.streams import Stream


@dataclass(frozen=True)
class ComparedSamples:
    """What is compared, one row per comparison: rewards, NaN where unknown, and the samples that get the advantages."""

    values: Float[Tensor, "rows compared rewards"]
    samples: Int[Tensor, "rows compared"]
    groups: Int[Tensor, " rows"]


def compared_samples(
    stream: Stream, values: Float[Tensor, "groups samples rewards"], drafts: Int[Tensor, "groups samples"]
) -> ComparedSamples:
    """Arrange the rewards of samples by what is compared for a stream.

    - Drafts: those of a prompt, by number. A draft's reward is the mean over its renderings that have one, for each
      reward before anything else is done to it; its advantage goes to its first sample.
    - Renderings: those of a draft; drafts that are rendered once are left out. Where none is rendered more often, as
      in an evaluation, they are all samples of a prompt, for its statistics.

    Args:
        values: NaN marks a null.
        drafts: number of each sample's draft; 0 to n - 1 in every group.
    """
    match stream:
        case "tokens":
            return _drafts(values, drafts)
        case "denoising":
            return _renderings(values, drafts)
        case _:
            assert_never(stream)


def _drafts(values: Float[Tensor, "groups samples rewards"], drafts: Int[Tensor, "groups samples"]) -> ComparedSamples:
    groups, samples, rewards = values.shape
    count = _count_renderings(drafts).shape[1]
    index = drafts.unsqueeze(-1).expand_as(values)
    known = ~values.isnan()
    # A sum from -0.0 leaves a single value as it is, to the bit.
    empty = values.new_full((groups, count, rewards), -0.0)
    sums = empty.scatter_add(1, index, torch.where(known, values, -0.0))
    counts = empty.scatter_add(1, index, known.to(values.dtype))
    firsts = (drafts.unsqueeze(1) == torch.arange(count).view(-1, 1)).int().argmax(-1)
    return ComparedSamples(
        values=torch.where(counts > 0, sums / counts, torch.nan),
        samples=firsts + torch.arange(groups).unsqueeze(-1) * samples,
        groups=torch.arange(groups),
    )


def _renderings(
    values: Float[Tensor, "groups samples rewards"], drafts: Int[Tensor, "groups samples"]
) -> ComparedSamples:
    groups, samples, rewards = values.shape
    renderings = _count_renderings(drafts)
    most = int(renderings.max())
    if most == 1:
        return ComparedSamples(values, torch.arange(groups * samples).view(groups, samples), torch.arange(groups))
    compared = renderings == most
    assert bool((compared | (renderings == 1)).all()), "drafts that are rendered several times are so equally often"
    # All samples, those of a draft one after another.
    order = drafts.argsort(dim=1, stable=True)
    kept = compared.gather(1, drafts.gather(1, order))
    chosen = (order + torch.arange(groups).unsqueeze(-1) * samples)[kept].view(-1, most)
    return ComparedSamples(values.reshape(-1, rewards)[chosen], samples=chosen, groups=chosen[:, 0] // samples)


def _count_renderings(drafts: Int[Tensor, "groups samples"]) -> Int[Tensor, "groups drafts"]:
    count = int(drafts.max()) + 1
    renderings = torch.zeros(len(drafts), count, dtype=torch.long).scatter_add(1, drafts, torch.ones_like(drafts))
    assert bool((renderings > 0).all()), "every group has the same drafts, each with a sample"
    return renderings


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
    """Compute the moments of each row's counted values in fp64; `magnitudes` bound the rounding of sums."""
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

    Returned are sum over k of w_k n_k of the samples that are present, and the sum of the summands' magnitudes.
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
