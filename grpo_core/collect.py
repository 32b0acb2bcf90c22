"""Groups of pictures for prompts, with everything that is needed to train on them later."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.policies.protocol import Policy
from grpo_core.records import TokenBatch


@dataclass(frozen=True)
class GroupRequest:
    """One prompt occurrence to be sampled.

    Attributes:
        prompt: what to draw.
        sample_ids: one a sibling.
        seeds: of the token sampling, one a sibling.
        noise_seeds: of the decoder's noise, one a sibling; siblings usually share it.
    """

    prompt: str
    sample_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    noise_seeds: tuple[int, ...]


@dataclass(frozen=True)
class RolloutGroup:
    """The siblings of one prompt occurrence.

    Attributes:
        request: what was asked.
        tokens: sampled ids, one row a sibling.
        rollout_logprobs: as recorded while sampling.
        images: the finished pictures.
    """

    request: GroupRequest
    tokens: TokenBatch
    rollout_logprobs: Float[Tensor, "siblings time"]
    images: tuple[Image.Image, ...]


def collect_rollouts(
    policy: Policy, requests: Sequence[GroupRequest], *, prompts_per_batch: int
) -> Iterator[RolloutGroup]:
    """Sample and render every group, in order; `prompts_per_batch` groups are sampled at once.

    Raises:
        NonFiniteError: a log-prob is not finite; the samples are named.
    """
    policy.prepare_for_sampling()
    for start in range(0, len(requests), prompts_per_batch):
        batch = requests[start : start + prompts_per_batch]
        group_size = len(batch[0].sample_ids)
        assert all(len(request.sample_ids) == group_size for request in batch), "groups of one size"
        sampled = policy.sample(
            [request.prompt for request in batch],
            group_size=group_size,
            seeds=[seed for request in batch for seed in request.seeds],
        )
        for index, request in enumerate(batch):
            rows = list(range(index * group_size, (index + 1) * group_size))
            tokens, logprobs = sampled.tokens.select(rows), sampled.rollout_logprobs[rows]
            finite = torch.isfinite(logprobs).all(-1).tolist()
            if not all(finite):
                broken = [sample for sample, good in zip(request.sample_ids, finite, strict=True) if not good]
                raise NonFiniteError("rollout log-prob", broken, "The policy's weights are damaged; go back a version.")
            images = policy.render(tokens, noise_seeds=request.noise_seeds)
            yield RolloutGroup(request, tokens, logprobs, tuple(images))
