"""Sample groups for prompts, with everything that later training needs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.policies.protocol import Policy, PolicyComponent
from grpo_core.rollouts.actions import Actions, DenoisingBatch, TokenBatch, pad_to_longest
from grpo_core.rollouts.records import (
    BrokenImage,
    ComparedLogprobs,
    GroupRequest,
    RolloutGroup,
    SampledTokens,
    TrainingRows,
)
from grpo_core.rollouts.streams import ImageSize, Stream


class _Drawn(Protocol):
    @property
    def size(self) -> ImageSize | None: ...

    @property
    def sources(self) -> Sequence[object]: ...


G = TypeVar("G", bound=_Drawn)


def sampled_at_once(groups: Sequence[G], prompts_per_batch: int) -> Iterator[Sequence[G]]:
    """Split groups, in order, into batches that can be sampled together, of at most `prompts_per_batch` groups.

    Images in a batch have one size and equally many source images, as a pipeline takes them; texts may differ.
    """
    for _, neighbours in itertools.groupby(groups, lambda group: group.size and (group.size, len(group.sources))):
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
    """Sample and render every group, in order; up to `prompts_per_batch` alike ones are sampled at once.

    With the reference its log-probs, and the policy's, are recorded for a KL inside the reward. NonFiniteError names
    samples whose log-probs or latents are not finite, or all if no image has finite pixels.
    """
    whole = not requests
    batches = list(sampled_at_once(requests, prompts_per_batch))
    assert all(len({len(request.sample_ids) for request in batch}) == 1 for batch in batches), "equally many samples"
    groups = policy.sample_batches(batches)
    for group in _with_reference(policy, groups, rows_per_pass) if with_reference else groups:
        whole = whole or not all(isinstance(output, BrokenImage) for output in group.outputs)
        yield group
    if not whole:
        hint = "The weights that make the images are damaged, or their arithmetic overflows: use float32 or bfloat16."
        raise NonFiniteError("pixel", [name for request in requests for name in request.sample_ids], hint)


def join_groups(
    groups: Sequence[RolloutGroup], advantages: Float[Tensor, "groups samples"], stream: Stream = "tokens"
) -> TrainingRows:
    """Return a stream's actions, without those of NaN advantages, for `update_policy` with the weights that sampled."""
    samples = sum(len(group.outputs) for group in groups)
    sampled = [group.streams[stream] for group in groups]
    prompts = [each.prompt_lengths for each in sampled if isinstance(each, SampledTokens)]
    rows = TrainingRows(
        sample_ids=tuple(sample_id for group in groups for sample_id in group.request.sample_ids),
        actions=_join([each.actions for each in sampled]),
        rollout_logprobs=pad_to_longest([each.rollout_logprobs for each in sampled]),
        advantages=advantages.flatten().float(),
        finished=torch.cat([each.finished for each in sampled]),
        on_policy=torch.ones(samples, dtype=torch.bool),
        max_length=sampled[0].max_length,
        prompt_lengths=torch.cat(prompts) if len(prompts) == len(sampled) else None,
    )
    return rows.select(rows.advantages.isfinite().nonzero().flatten().tolist())


def _join(parts: Sequence[Actions]) -> Actions:
    kind: type[TokenBatch] | type[DenoisingBatch] = type(parts[0])
    return kind.join(parts)  # type: ignore[arg-type]


def _with_reference(policy: Policy, groups: Iterator[RolloutGroup], rows_per_pass: int) -> Iterator[RolloutGroup]:
    # Where networks are offloaded, those that sample and those that score would change places for each group.
    parts = [list(groups)] if policy.offload.enabled else ([group] for group in groups)
    for part in parts:
        compared = {
            stream: _compared(component, [group.streams[stream].actions for group in part], rows_per_pass)
            for stream, component in policy.components.items()
        }
        for place, group in enumerate(part):
            yield replace(group, compared={stream: each[place] for stream, each in compared.items()})


@torch.no_grad()
def _compared(component: PolicyComponent, groups: Sequence[Actions], rows_per_pass: int) -> list[ComparedLogprobs]:
    """Score each group under the policy and under its reference, both in one pass over whole rows.

    Sampling token by token rounds differently, and a reward without another spread would be that difference.
    """

    def chunks(actions: Actions) -> Iterator[Actions]:
        starts = range(0, len(actions), rows_per_pass)
        return (actions.select(range(start, min(start + rows_per_pass, len(actions)))) for start in starts)

    def scores(score: Callable[[Actions], Tensor]) -> list[Tensor]:
        return [torch.cat([score(chunk).cpu() for chunk in chunks(actions)]) for actions in groups]

    scored = scores(lambda actions: component.logprobs(actions, entropy="none").logprobs)
    with component.as_reference():
        return list(map(ComparedLogprobs, scored, scores(component.reference_logprobs)))
