"""Records keep their rows together and refuse what does not fit."""

from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo_core.image_size import ImageSize
from grpo_core.losses import estimate_kl
from grpo_core.records import DenoisingBatch, SampledTokens, TokenBatch, TokenSupport, TrainingRows

IDS = torch.arange(6).reshape(3, 2)
MASK = torch.tensor([[True, True], [True, False], [True, True]])
# Of row 0 the ids 5, 6 and 7; of row 1 the id 8; of row 2 the ids 9 and 10.
SUPPORT = TokenSupport(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([[2, 1], [1, 0], [1, 1]]))


def rows() -> TrainingRows:
    batch = TokenBatch(("a", "b", "c"), IDS, MASK, 0.9)
    return TrainingRows(
        sample_ids=("s0", "s1", "s2"),
        actions=batch,
        rollout_logprobs=-IDS.float(),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        finished=torch.tensor([True, False, True]),
        on_policy=torch.tensor([False, True, True]),
        max_length=2,
    )


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
