"""Rows of similar length go through the model together, each once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.update.settings import microbatches


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 9))
def test_each_row_once_and_no_microbatch_above_its_size(lengths: list[int], size: int) -> None:
    parts = microbatches(lengths, size)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1])
    longest_first = [lengths[row] for part in parts for row in part]
    assert longest_first == sorted(lengths, reverse=True)


def test_rows_of_one_length_keep_their_order() -> None:
    assert microbatches([5] * 5, 2) == [[0, 1], [2, 3], [4]]


def test_packing_halves_the_padding_of_mixed_lengths() -> None:
    lengths = [1, 9] * 4
    packed = sum(len(part) * max(lengths[row] for row in part) for part in microbatches(lengths, 4))
    in_order = sum(4 * max(lengths[start : start + 4]) for start in (0, 4))
    assert (packed, in_order) == (40, 72)
