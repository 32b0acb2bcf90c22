"""Rollouts: each group with its own tokens, log-probs and images, whatever is sampled beside it."""

import math
from collections.abc import Sequence

import pytest
import torch
from PIL import Image
from torch import Tensor

from grpo_core.collect import collect_rollouts
from grpo_core.errors import NonFiniteError
from grpo_core.groups import GroupRequest, RolloutGroup
from grpo_core.records import BrokenImage, TokenBatch
from tests.grpo_core.toy_policy import TablePolicy


def request_for(prompt: str, first: int, siblings: int = 3) -> GroupRequest:
    """Samples `first`, `first` + 1, ... with seeds of the same numbers and one noise."""
    numbers = tuple(range(first, first + siblings))
    return GroupRequest(prompt, tuple(f"s{number}" for number in numbers), numbers, (first,) * siblings)


REQUESTS = [request_for("2", 0), request_for("0", 10), request_for("2", 20), request_for("1", 30), request_for("2", 0)]


def collected(requests: list[GroupRequest], prompts_per_batch: int) -> list[RolloutGroup]:
    return list(collect_rollouts(TablePolicy(3), requests, prompts_per_batch=prompts_per_batch))


def tokens_of(group: RolloutGroup) -> TokenBatch:
    return group.streams["tokens"].actions


def logprobs_of(group: RolloutGroup) -> Tensor:
    return group.streams["tokens"].rollout_logprobs


def same(first: RolloutGroup, second: RolloutGroup) -> bool:
    return (
        torch.equal(tokens_of(first).token_ids, tokens_of(second).token_ids)
        and torch.equal(logprobs_of(first), logprobs_of(second))
        and [output.tobytes() for output in first.outputs] == [output.tobytes() for output in second.outputs]
    )


@pytest.mark.parametrize("prompts_per_batch", [1, 2, 3, 100])
def test_groups_come_in_order_and_do_not_depend_on_the_batch(prompts_per_batch: int) -> None:
    groups = collected(REQUESTS, prompts_per_batch)
    assert [group.request for group in groups] == REQUESTS
    assert [tokens_of(group).prompts for group in groups] == [(request.prompt,) * 3 for request in REQUESTS]
    for group, request in zip(groups, REQUESTS, strict=True):
        assert same(group, collected([request], 1)[0])


def test_images_are_of_their_tokens_and_noise() -> None:
    """The table's image is one pixel: its first two ids, and its noise seed."""
    for group, request in zip(collected(REQUESTS, 2), REQUESTS, strict=True):
        expected = [
            (*ids[:2], seed) for ids, seed in zip(tokens_of(group).token_ids.tolist(), request.noise_seeds, strict=True)
        ]
        assert [image.getpixel((0, 0)) for image in group.outputs] == expected


def test_occurrences_of_one_prompt_are_groups_of_their_own() -> None:
    """By seed, not by text: the third group draws otherwise than the first, the fifth repeats it."""
    groups = collected(REQUESTS, 5)
    assert not same(groups[0], groups[2])
    assert same(groups[0], groups[4])


def test_log_probs_are_those_of_the_tokens_beside_them() -> None:
    policy = TablePolicy(3)
    for group in collect_rollouts(policy, REQUESTS, prompts_per_batch=2):
        torch.testing.assert_close(policy.logprobs(tokens_of(group)).logprobs.detach(), logprobs_of(group))


def test_the_first_group_is_there_before_the_last_is_sampled() -> None:
    policy = TablePolicy(3)
    groups = collect_rollouts(policy, REQUESTS, prompts_per_batch=1)
    next(groups)
    with torch.no_grad():
        policy.table.fill_(math.nan)
    with pytest.raises(NonFiniteError):
        next(groups)


def test_samples_that_are_not_finite_are_named_before_any_of_their_batch_is_given_out() -> None:
    policy = TablePolicy(3)
    with torch.no_grad():
        policy.table[0, 3] = math.nan
    with pytest.raises(NonFiniteError, match="rollout log-prob is not finite for 3 sample") as caught:
        next(collect_rollouts(policy, REQUESTS, prompts_per_batch=5))
    assert caught.value.sample_ids == ("s10", "s11", "s12")


class BrokenRenderer(TablePolicy):
    """Pixels of the images of these noise seeds are not numbers."""

    def __init__(self, broken: set[int]) -> None:
        super().__init__(3)
        self.broken = broken

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image]:
        images = super().render(tokens, noise_seeds=noise_seeds)
        pairs = zip(images, noise_seeds, strict=True)
        return [BrokenImage(image, "NaN") if seed in self.broken else image for image, seed in pairs]  # type: ignore[misc]


def test_broken_images_are_an_error_where_no_image_is_whole() -> None:
    assert len(list(collect_rollouts(BrokenRenderer({0, 10, 20}), REQUESTS, prompts_per_batch=2))) == len(REQUESTS)
    with pytest.raises(NonFiniteError, match="pixel") as caught:
        list(collect_rollouts(BrokenRenderer({0, 10}), [REQUESTS[0], REQUESTS[1], REQUESTS[4]], prompts_per_batch=2))
    assert caught.value.sample_ids == ("s0", "s1", "s2", "s10", "s11", "s12", "s0", "s1", "s2")


def test_the_reference_is_asked_where_the_reward_needs_it() -> None:
    policy = TablePolicy(3)
    with torch.no_grad():
        policy.table.mul_(2)
    for group in collect_rollouts(policy, REQUESTS, prompts_per_batch=2, with_reference=True, rows_per_pass=2):
        compared = group.compared["tokens"]
        torch.testing.assert_close(compared.reference, policy.reference_logprobs(tokens_of(group)))
        assert not torch.allclose(compared.reference, logprobs_of(group))
        torch.testing.assert_close(compared.scored, logprobs_of(group))
    assert not any(group.compared for group in collected(REQUESTS, 2))


def test_a_draft_is_sampled_once_and_stands_beside_each_of_its_renderings() -> None:
    policy = TablePolicy(3)
    request = GroupRequest("2", ("a", "b", "c", "d"), seeds=(5, 5, 5, 6), noise_seeds=(1, 2, 3, 1))
    (group,) = collect_rollouts(policy, [request], prompts_per_batch=1)
    (alone,) = collected([request_for("2", 5, 2)], 1)
    assert torch.equal(tokens_of(group).token_ids, tokens_of(alone).token_ids[[0, 0, 0, 1]])
    assert [image.getpixel((0, 0))[2] for image in group.outputs] == [1, 2, 3, 1]
    assert [len(prompts) for prompts, _ in policy.batches] == [1]
