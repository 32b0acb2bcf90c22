"""Rows of an update without padding, by hand and against rows that are padded."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from grpo_core.rollouts.actions import TokenBatch, TokenSupport
from grpo_core.rollouts.ragged import Ragged, RaggedRows, RaggedTokens
from grpo_core.rollouts.records import TrainingRows

LONG, SHORT, SHORT_ROWS = 16_000, 16, 1_000
LENGTHS = torch.tensor([3, 0, 1])


def ragged() -> Ragged:
    """Rows [1, 2, 3], [] and [4]."""
    return Ragged(torch.tensor([1, 2, 3, 4]), LENGTHS)


def test_rows_are_padded_where_they_are_selected() -> None:
    assert ragged().select([2, 0]).tolist() == [[4, 0, 0], [1, 2, 3]]
    assert ragged().select([2, 2]).tolist() == [[4], [4]]
    assert ragged().select([1]).tolist() == [[0]]
    assert ragged().padded().tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert ragged().take([2, 1, 0]).values.tolist() == [4, 1, 2, 3]
    assert ragged().sums().tolist() == [6, 0, 4]


@pytest.mark.parametrize(
    ("columns", "expected"), [(3, [7, 8, 9, 5]), (2, [7, 8, 3, 5]), (4, [7, 8, 9, 5]), (1, [7, 2, 3, 5])]
)
def test_values_of_a_part_are_written_back_as_far_as_they_go(columns: int, expected: list[int]) -> None:
    rows = ragged()
    rows.put([2, 0], torch.tensor([[5, -1, -1, -1], [7, 8, 9, -1]])[:, :columns])
    assert rows.values.tolist() == expected


def uneven_rows() -> TrainingRows:
    """Three rows of 2, 3 and 1 tokens, of which the second's first is not trained, with two or one ids each."""
    mask = torch.tensor([[True, True, False, False], [False, True, True, False], [True, False, False, False]])
    counts = torch.tensor([[2, 1, 0, 0], [0, 1, 2, 0], [1, 0, 0, 0]])
    tokens = TokenBatch(
        prompts=("a", "b", "c"),
        token_ids=torch.where(mask, torch.arange(12).view(3, 4), 0),
        loss_mask=mask,
        temperature=1.0,
        support=TokenSupport(torch.arange(10, 17), counts),
    )
    logprobs = torch.where(mask, -torch.arange(12.0).view(3, 4), 0.0)
    return TrainingRows(
        actions=tokens,
        rollout_logprobs=logprobs,
        finished=torch.tensor([True, False, True]),
        max_length=4,
        sample_ids=("x", "y", "z"),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        on_policy=torch.tensor([True, True, False]),
        old_logprobs=2 * logprobs,
        prompt_lengths=torch.tensor([5, 6, 7]),
    )


@pytest.mark.parametrize("chosen", [[0, 1, 2], [2, 0], [2], [1, 1, 0], []])
def test_selected_rows_are_those_of_padded_rows(chosen: list[int]) -> None:
    padded = uneven_rows()
    found, expected = RaggedRows.of(padded).select(chosen), padded.select(chosen)
    actions = expected.actions.trimmed()
    assert isinstance(found.actions, TokenBatch)
    assert isinstance(actions, TokenBatch)
    width = found.actions.token_ids.shape[1]
    assert width == (actions.token_ids.shape[1])
    require_equal(found.actions, actions)
    cut = {name: getattr(expected, name)[:, :width] for name in ("rollout_logprobs", "old_logprobs")}
    require_equal(found, replace(expected, **cut))
    assert RaggedRows.of(padded).lengths(chosen) == padded.lengths(chosen)


def require_equal(found: object, expected: object) -> None:
    for name in (each.name for each in fields(expected)):  # type: ignore[arg-type]
        ours, theirs = getattr(found, name), getattr(expected, name)
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
        elif isinstance(theirs, TokenSupport):
            require_equal(ours, theirs)
        elif not isinstance(theirs, TokenBatch):
            assert ours == theirs, name


def bytes_of(*tensors: Tensor) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors)


def test_a_long_row_takes_its_own_bytes_alone() -> None:
    """An id of 4 bytes, a mask of one and a log-prob of 4 for each of 32,000 tokens; padded there are 16,016,000."""
    lengths = torch.tensor([LONG, *[SHORT] * SHORT_ROWS])
    tokens = LONG + SHORT * SHORT_ROWS
    ids = Ragged(torch.arange(tokens, dtype=torch.int32), lengths)
    mask, logprobs = ids.like(torch.ones(tokens, dtype=torch.bool)), ids.like(torch.zeros(tokens))
    actions = RaggedTokens(("a",) * (SHORT_ROWS + 1), ids, mask, 1.0)
    assert bytes_of(actions.token_ids.values, actions.loss_mask.values, logprobs.values) == 288_000
    part = actions.select([1, SHORT_ROWS])
    assert bytes_of(part.token_ids, part.loss_mask) == 2 * SHORT * (8 + 1)
    assert part.token_ids[:, 0].tolist() == [LONG, tokens - SHORT]
