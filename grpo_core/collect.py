"""Sample groups for prompts, with everything that later training needs."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.image_size import ImageSize
from grpo_core.policies.protocol import Policy
from grpo_core.records import Output, SampledTokens, TokenBatch, TrainingRows, pad_to_longest


@dataclass(frozen=True)
class GroupRequest:
    """One prompt occurrence to be sampled.

    Attributes:
        prompt: its text.
        sample_ids: one per sibling.
        seeds: for the token sampling, one per sibling.
        noise_seeds: for a decoder's noise, one per sibling; usually equal for all of them.
        size: of the images; None: texts, or images of the size in the policy's settings.
    """

    prompt: str
    sample_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    noise_seeds: tuple[int, ...]
    size: ImageSize | None = None


@dataclass(frozen=True)
class RolloutGroup:
    """The siblings of one prompt occurrence.

    Attributes:
        request: what was sampled.
        tokens: sampled ids, one row per sibling.
        rollout_logprobs: as recorded while sampling.
        finished: False for a row that was truncated at its maximum length.
        scored_logprobs: of the same tokens under the policy that sampled, computed in one pass like the reference's;
            None unless requested.
        ref_logprobs: under the reference; None unless requested.
        outputs: the finished images or texts.
        prompt_length: number of ids that the model read before the first token.
        max_length: of TrainingRows.
    """

    request: GroupRequest
    tokens: TokenBatch
    rollout_logprobs: Float[Tensor, "siblings time"]
    finished: Bool[Tensor, " siblings"]
    scored_logprobs: Float[Tensor, "siblings time"] | None
    ref_logprobs: Float[Tensor, "siblings time"] | None
    outputs: tuple[Output, ...]
    prompt_length: int
    max_length: int


class _OfOneSize(Protocol):
    @property
    def size(self) -> ImageSize | None: ...


G = TypeVar("G", bound=_OfOneSize)


def sampled_at_once(groups: Sequence[G], prompts_per_batch: int) -> Iterator[Sequence[G]]:
    """Split groups into batches, in order: neighbours of one image size, at most `prompts_per_batch` of them."""
    for _, neighbours in itertools.groupby(groups, lambda group: group.size):
        same = list(neighbours)
        for start in range(0, len(same), prompts_per_batch):
            yield same[start : start + prompts_per_batch]


def collect_rollouts(
    policy: Policy,
    requests: Sequence[GroupRequest],
    *,
    prompts_per_batch: int,
    with_reference: bool = False,
    rows_per_pass: int = 8,
) -> Iterator[RolloutGroup]:
    """Sample and render every group, in order; up to `prompts_per_batch` groups of one size are sampled at once.

    Args:
        with_reference: record the log-probs of policy and reference too, for a KL inside the reward.

    Raises:
        NonFiniteError: a log-prob is not finite; the samples are named.
    """
    policy.prepare_for_sampling()
    for batch in sampled_at_once(requests, prompts_per_batch):
        group_size = len(batch[0].sample_ids)
        assert all(len(request.sample_ids) == group_size for request in batch), "equally many siblings"
        sampled = policy.sample(
            [request.prompt for request in batch],
            group_size=group_size,
            seeds=[seed for request in batch for seed in request.seeds],
            size=batch[0].size,
        )
        _require_finite(sampled, [sample_id for request in batch for sample_id in request.sample_ids])
        for index, request in enumerate(batch):
            rows = list(range(index * group_size, (index + 1) * group_size))
            tokens = sampled.tokens.select(rows).trimmed()
            time = tokens.token_ids.shape[1]
            scored, reference = _compared(policy, tokens, rows_per_pass) if with_reference else (None, None)
            yield RolloutGroup(
                request=request,
                tokens=tokens,
                rollout_logprobs=sampled.rollout_logprobs[rows, :time],
                finished=sampled.finished[rows],
                scored_logprobs=scored,
                ref_logprobs=reference,
                outputs=tuple(policy.render(tokens, noise_seeds=request.noise_seeds)),
                prompt_length=int(sampled.prompt_lengths[rows[0]]),
                max_length=policy.max_length,
            )


def join_groups(groups: Sequence[RolloutGroup], advantages: Float[Tensor, "groups siblings"]) -> TrainingRows:
    """Return the samples of all groups with their advantages, ready for `update_policy` with the weights that sampled.

    Args:
        groups: with equal numbers of siblings.
        advantages: NaN for a sample that is left out.
    """
    samples = sum(len(group.tokens) for group in groups)
    rows = TrainingRows(
        sample_ids=tuple(sample_id for group in groups for sample_id in group.request.sample_ids),
        tokens=TokenBatch.join([group.tokens for group in groups]),
        rollout_logprobs=pad_to_longest([group.rollout_logprobs for group in groups]),
        advantages=advantages.flatten().float(),
        finished=torch.cat([group.finished for group in groups]),
        on_policy=torch.ones(samples, dtype=torch.bool),
        max_length=groups[0].max_length,
    )
    return rows.select(rows.advantages.isfinite().nonzero().flatten().tolist())


def _require_finite(sampled: SampledTokens, sample_ids: Sequence[str]) -> None:
    finite = torch.isfinite(sampled.rollout_logprobs).all(-1).tolist()
    broken = [sample_id for sample_id, good in zip(sample_ids, finite, strict=True) if not good]
    if broken:
        raise NonFiniteError("rollout log-prob", broken, "The weights are damaged; go back to an earlier version.")


@torch.no_grad()
def _compared(
    policy: Policy, tokens: TokenBatch, rows_per_pass: int
) -> tuple[Float[Tensor, "siblings time"], Float[Tensor, "siblings time"]]:
    """Compute the log-probs under the policy and under its reference.

    Both in one pass over whole rows: against those recorded while sampling, token by token, an unchanged policy would
    differ from itself by the rounding, and a reward without any other spread would be that difference.
    """
    scored, reference = [], []
    for start in range(0, len(tokens), rows_per_pass):
        chunk = tokens.select(range(start, min(start + rows_per_pass, len(tokens))))
        scored.append(policy.logprobs(chunk, entropy="none").logprobs.cpu())
        reference.append(policy.reference_logprobs(chunk).cpu())
    return torch.cat(scored), torch.cat(reference)
