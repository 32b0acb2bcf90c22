"""Which samples of a prompt are compared to train a stream, and by which rewards.

Tokens decide between the drafts of a prompt and denoising steps between the renderings of one draft. One comparison for
both would give the denoising steps no signal, since nearly all of the difference is the tokens', and equally many
renderings of every draft would leave few drafts for the tokens. So the samples of a prompt can be uneven: many drafts,
a few of them rendered several times.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_core.streams import Stream


@dataclass(frozen=True)
class ComparedSamples:
    """What is compared, one row per comparison.

    Attributes:
        values: rewards of what is compared; NaN where none is known.
        samples: index of the sample whose actions get the advantage, among all samples, group after group.
        groups: index of the group that each row belongs to.
    """

    values: Float[Tensor, "rows compared rewards"]
    samples: Int[Tensor, "rows compared"]
    groups: Int[Tensor, " rows"]


def compared_samples(
    stream: Stream, values: Float[Tensor, "groups samples rewards"], drafts: Int[Tensor, "groups samples"]
) -> ComparedSamples:
    """Arrange the rewards of samples by what is compared for a stream.

    - Drafts: those of a prompt, in the order of their numbers. A draft's reward is the mean over its renderings that
      have one, for each reward before anything else is done to it; its advantage goes to its first sample, whose tokens
      are those of all its renderings.
    - Renderings: those of a draft, in the order of the samples; drafts that are rendered once are left out. Where no
      draft is rendered more often, as in an evaluation, they are all samples of a prompt, for its statistics.

    Args:
        values: NaN marks a null.
        drafts: number of the draft that each sample is rendered from; 0 to n - 1 in every group.
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
