"""Token sequences for groups: each draft is sampled once, however often it is rendered."""

from collections.abc import Callable, Iterator, Sequence

from grpo_core.groups import GroupRequest
from grpo_core.image_size import ImageSize
from grpo_core.records import SampledTokens

SampleTokens = Callable[[Sequence[str], int, Sequence[int], ImageSize | None], SampledTokens]
"""Prompts, drafts per prompt, one seed per draft, and the size of the images -> drafts of one prompt side by side."""


def sample_drafts(
    requests: Sequence[GroupRequest], sample: SampleTokens
) -> Iterator[tuple[GroupRequest, SampledTokens]]:
    """Sample the drafts of all groups at once, and give each group one row per sample.

    Args:
        requests: of one image size, each with equally many different seeds.
    """
    seeds = [tuple(dict.fromkeys(request.seeds)) for request in requests]
    count = len(seeds[0])
    assert all(len(each) == count for each in seeds), "equally many drafts"
    prompts = [request.prompt for request in requests]
    sampled = sample(prompts, count, [seed for each in seeds for seed in each], requests[0].size)
    for place, (request, own) in enumerate(zip(requests, seeds, strict=True)):
        rows = [place * count + own.index(seed) for seed in request.seeds]
        yield request, sampled.select(rows)
