"""Token sequences for groups: each token sample is drawn once, however many images are made of it."""

from collections.abc import Callable, Iterator, Sequence

import torch

from grpo_core.errors import NonFiniteError
from grpo_core.rollouts.actions import Sources
from grpo_core.rollouts.records import GroupRequest, SampledTokens
from grpo_core.rollouts.streams import ImageSize

SampleTokens = Callable[[Sequence[str], int, Sequence[int], ImageSize | None, Sources | None], SampledTokens]
"""Prompts, drafts per prompt, one seed per draft, the size of the images, and the source images of each prompt (None:
no prompt has any) -> drafts of one prompt side by side."""


def sample_drafts(
    requests: Sequence[GroupRequest], sample: SampleTokens
) -> Iterator[tuple[GroupRequest, SampledTokens]]:
    """Sample the drafts of all groups of one image size at once, and give each group one row per sample.

    NonFiniteError names the samples of all groups before any group is given out.
    """
    seeds = [tuple(dict.fromkeys(request.seeds)) for request in requests]
    count = len(seeds[0])
    assert all(len(each) == count for each in seeds), "equally many drafts"
    prompts = [request.prompt for request in requests]
    sources = tuple(request.sources for request in requests)
    sampled = sample(
        prompts,
        count,
        [seed for each in seeds for seed in each],
        requests[0].size,
        sources if any(sources) else None,
    )
    rows = [
        [place * count + own.index(seed) for seed in request.seeds]
        for place, (request, own) in enumerate(zip(requests, seeds, strict=True))
    ]
    _require_finite(requests, rows, sampled)
    for request, own_rows in zip(requests, rows, strict=True):
        yield request, sampled.select(own_rows)


def _require_finite(requests: Sequence[GroupRequest], rows: Sequence[Sequence[int]], sampled: SampledTokens) -> None:
    finite = torch.isfinite(sampled.rollout_logprobs).all(-1).tolist()
    names = ((request.sample_ids, own_rows) for request, own_rows in zip(requests, rows, strict=True))
    broken = [name for ids, own_rows in names for name, row in zip(ids, own_rows, strict=True) if not finite[row]]
    if broken:
        raise NonFiniteError("rollout log-prob", broken, "The weights are damaged; go back to an earlier version.")
