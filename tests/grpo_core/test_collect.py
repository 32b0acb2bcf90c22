"""Rollouts: each group with its own tokens, log-probs and images, whatever is sampled beside it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from PIL import Image
from torch import Tensor

from grpo_core.collect import collect_rollouts
from grpo_core.errors import NonFiniteError
from grpo_core.losses.ratios import estimate_kl
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch, TokenSupport
from grpo_core.rollouts.records import (
    BrokenImage,
    GroupRequest,
    RolloutGroup,
    SampledActions,
    SampledTokens,
    TrainingRows,
)
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.toy_policy import TablePolicy, training_rows


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


def test_occurrences_of_one_prompt_are_groups_of_their_own() -> None:
    """By seed, not by text: the third group draws otherwise than the first, the fifth repeats it."""
    groups = collected(REQUESTS, 5)
    assert not same(groups[0], groups[2])
    assert same(groups[0], groups[4])


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
    with pytest.raises(NonFiniteError) as caught:
        next(collect_rollouts(policy, REQUESTS, prompts_per_batch=5))
    assert (caught.value.quantity, caught.value.sample_ids) == ("rollout log-prob", ("s10", "s11", "s12"))


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
    with pytest.raises(NonFiniteError) as caught:
        list(collect_rollouts(BrokenRenderer({0, 10}), [REQUESTS[0], REQUESTS[1], REQUESTS[4]], prompts_per_batch=2))
    assert caught.value.quantity == "pixel"
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


IDS = torch.arange(6).reshape(3, 2)
MASK = torch.tensor([[True, True], [True, False], [True, True]])
# Of row 0 the ids 5, 6 and 7; of row 1 the id 8; of row 2 the ids 9 and 10.
SUPPORT = TokenSupport(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([[2, 1], [1, 0], [1, 1]]))


def rows() -> TrainingRows:
    batch = TokenBatch(("a", "b", "c"), IDS, MASK, 0.9)
    sampled = SampledActions(batch, -IDS.float(), torch.tensor([True, False, True]), max_length=2)
    return replace(training_rows(sampled, [1.0, 2.0, 3.0]), on_policy=torch.tensor([False, True, True]))


def test_selected_rows_stay_together_in_the_order_asked_for() -> None:
    known = replace(rows(), old_logprobs=IDS.float() * 2, old_entropy=IDS.float() * 3, ref_logprobs=IDS.float() * 4)
    chosen = known.select([2, 0, 2])
    assert chosen.sample_ids == ("s2", "s0", "s2")
    assert chosen.actions.prompts == ("c", "a", "c")
    assert chosen.actions.token_ids.tolist() == [[4, 5], [0, 1], [4, 5]]
    assert chosen.actions.loss_mask.tolist() == [[True, True]] * 3
    assert chosen.actions.temperature == 0.9
    assert chosen.rollout_logprobs.tolist() == [[-4.0, -5.0], [0.0, -1.0], [-4.0, -5.0]]
    assert chosen.advantages.tolist() == [3.0, 1.0, 3.0]
    assert chosen.finished.tolist() == [True, True, True]
    assert chosen.on_policy.tolist() == [True, False, True]
    quantities = (chosen.old_logprobs, chosen.old_entropy, chosen.ref_logprobs)
    for factor, values in zip((2, 3, 4), quantities, strict=True):
        assert values is not None
        assert values.tolist() == [[4.0 * factor, 5.0 * factor], [0.0, 1.0 * factor], [4.0 * factor, 5.0 * factor]]


def test_the_support_of_a_row_goes_with_it() -> None:
    batch = TokenBatch(("a", "b", "c"), IDS, MASK, 1.0, SUPPORT).select([2, 1, 2])
    assert batch.support is not None
    assert batch.support.ids.tolist() == [9, 10, 8, 9, 10]
    assert batch.support.counts.tolist() == [[1, 1], [1, 0], [1, 1]]
    nobody = batch.select([]).support
    assert nobody is not None
    assert len(nobody.ids) == 0


def test_repeated_rows_have_their_tokens_and_supports_again() -> None:
    longer = TokenBatch(("a", "b", "c"), IDS, MASK, 1.0, SUPPORT).repeated(2)
    assert longer.token_ids.tolist() == [[0, 1, 0, 1], [2, 3, 2, 3], [4, 5, 4, 5]]
    assert longer.loss_mask.tolist() == [[True] * 4, [True, False, True, False], [True] * 4]
    assert longer.support is not None
    assert longer.support.ids.tolist() == [5, 6, 7, 5, 6, 7, 8, 8, 9, 10, 9, 10]
    assert longer.support.counts.tolist() == [[2, 1, 2, 1], [1, 0, 1, 0], [1, 1, 1, 1]]


def test_padding_at_the_end_of_every_row_is_cut_off() -> None:
    mask = torch.tensor([[True, False, False], [True, True, False]])
    support = TokenSupport(torch.tensor([3, 4, 5]), torch.tensor([[1, 0, 0], [1, 1, 0]]))
    trimmed = TokenBatch(("a", "b"), torch.arange(6).reshape(2, 3), mask, 1.0, support).trimmed()
    assert trimmed.token_ids.tolist() == [[0, 1], [3, 4]]
    assert trimmed.loss_mask.tolist() == [[True, False], [True, True]]
    assert trimmed.support is not None
    assert trimmed.support.counts.tolist() == [[1, 0], [1, 1]]
    nothing = TokenBatch(("a",), torch.ones(1, 3).long(), torch.zeros(1, 3).bool(), 1.0).trimmed()
    assert nothing.token_ids.tolist() == [[1]]


def test_shapes_and_dtypes_of_signatures_are_checked_in_tests() -> None:
    """The import hook of tests/conftest.py is on: without it, broadcasting would let these pass."""
    with pytest.raises(TypeCheckError):
        estimate_kl(torch.zeros(3, 2), torch.zeros(1, 2), MASK, "k3")
    with pytest.raises(TypeCheckError):
        SampledTokens(TokenBatch(("a", "b", "c"), IDS, MASK, 1.0), IDS, torch.ones(3).bool(), 2, torch.ones(3).long())


def steps(*values: float, drafts: TokenBatch | None = None) -> DenoisingBatch:
    """One row per value, whose three states are the value, its double and its triple."""
    return DenoisingBatch(
        prompts=tuple(f"p{value:g}" for value in values),
        states=tuple(torch.tensor([value, 2 * value, 3 * value]).view(3, 1, 1) for value in values),
        first_steps=tuple(int(value) for value in values),
        sizes=tuple(ImageSize(int(value), 8) for value in values),
        drafts=drafts,
    )


def test_rows_of_denoising_steps_keep_together_what_belongs_to_them() -> None:
    tokens = TokenBatch(("p1", "p2", "p3"), torch.arange(6).reshape(3, 2), torch.ones(3, 2).bool(), 1.0)
    joined = DenoisingBatch.join([steps(1, 2, 3, drafts=tokens), steps(4, drafts=tokens.select([0]))])
    chosen = joined.select([3, 1])
    assert chosen.prompts == ("p4", "p2")
    assert chosen.first_steps == (4, 2)
    assert [size.width for size in chosen.sizes] == [4, 2]
    assert [states.flatten().tolist() for states in chosen.states] == [[4, 8, 12], [2, 4, 6]]
    assert chosen.drafts is not None
    assert chosen.drafts.token_ids.tolist() == [[0, 1], [2, 3]]
    assert torch.equal(chosen.loss_mask, torch.ones(2, 2).bool())
    assert chosen.trimmed() is chosen


def test_denoising_steps_with_and_without_drafts_cannot_be_joined() -> None:
    tokens = TokenBatch(("p1",), torch.ones(1, 2).long(), torch.ones(1, 2).bool(), 1.0)
    with pytest.raises(AssertionError, match="sampled alike"):
        DenoisingBatch.join([steps(1, drafts=tokens), steps(2)])
