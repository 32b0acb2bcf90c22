"""Microbatches have every row once, none too many, and never more to compute than whole rows by length."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.policies.microbatches import by_length, computed_positions, sharing_prompts, similar_lengths


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 9))
def test_each_row_once_and_no_microbatch_above_its_size(lengths: list[int], size: int) -> None:
    parts = by_length(lengths, size)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1])
    longest_first = [lengths[row] for part in parts for row in part]
    assert longest_first == sorted(lengths, reverse=True)


def test_rows_of_one_length_keep_their_order() -> None:
    assert by_length([5] * 5, 2) == [[0, 1], [2, 3], [4]]


def test_rows_of_one_pass_are_neighbours_among_those_of_one_length() -> None:
    assert by_length([5, 5, 5, 5, 7, 5, 5], 3, "abababa") == [[4, 0, 2], [6, 1, 3], [5]]


def test_passes_are_cut_where_a_row_is_a_quarter_shorter() -> None:
    assert similar_lengths([3, 16, 12, 16, 12, 3, 4, 11, 3]) == [[1, 3, 2, 4], [7, 6, 0, 5, 8]]
    # Three rows are no pass of their own, neither at the end nor in the middle.
    assert similar_lengths([20, 20, 20, 20, 4, 4, 4]) == [[0, 1, 2, 3, 4, 5, 6]]
    assert similar_lengths([20, 20, 20, 4, 4, 4, 4, 4]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def computed(plan: list[list[int]], lengths: list[int], prompts: list[int], prompt_lengths: list[int]) -> int:
    """Positions of the layers: distinct prompts padded to the longest, and each pass of completions padded to its."""
    total = 0
    for part in plan:
        own = [lengths[row] for row in part]
        longest = max(prompt_lengths[row] for row in part)
        groups = {prompts[row] for row in part}
        if len(groups) == len(part):
            total += len(part) * (longest + max(own) - 1)
        else:
            total += len(groups) * longest
            total += sum(len(each) * (max(own[place] for place in each) - 1) for each in similar_lengths(own))
    return total


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), min_size=1, max_size=40), st.integers(1, 16))
def test_no_plan_computes_more_than_whole_rows(rows: list[tuple[int, int]], size: int) -> None:
    lengths, prompts = [length for length, _ in rows], [prompt for _, prompt in rows]
    prompt_lengths = [7 * prompt + 1 for prompt in prompts]
    plan = sharing_prompts(lengths, prompts, prompt_lengths, size)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    assert max(map(len, plan)) <= size
    whole = sum(
        len(part) * (max(prompt_lengths[row] for row in part) + max(lengths[row] for row in part) - 1)
        for part in by_length(lengths, size)
    )
    assert computed(plan, lengths, prompts, prompt_lengths) <= whole


def test_groups_stay_together_where_that_is_less_to_compute() -> None:
    # Four prompts of 28 ids with eight completions of twelve tokens, in another order.
    prompts = [row % 4 for row in range(32)]
    plan = sharing_prompts([12] * 32, prompts, [28] * 32, 8)
    assert [[prompts[row] for row in part] for part in plan] == [[prompt] * 8 for prompt in range(4)]
    assert computed(plan, [12] * 32, prompts, [28] * 32) == 464
    # A group that is larger than a microbatch is cut by length.
    assert sharing_prompts([9, 3, 9, 3, 9, 3], [0] * 6, [50] * 6, 4) == [[0, 2, 4, 1], [3, 5]]


def test_long_answers_to_short_prompts_are_grouped_by_length() -> None:
    lengths = [100, 10] * 8
    assert sharing_prompts(lengths, [row // 2 for row in range(16)], [3] * 16, 4) == by_length(lengths, 4)


def test_a_pass_over_few_positions_costs_as_much_as_it_takes_to_read_the_weights() -> None:
    # Eight completions of 12 tokens of a prompt of 28 ids, then of 100 tokens of a prompt of 300.
    assert computed_positions([12] * 8, 1, 28, 0) == (8 * 39, 28 + 88)
    assert computed_positions([12] * 8, 1, 28, 300) == (8 * 39, 600)
    assert computed_positions([100] * 8, 1, 300, 400) == (8 * 399, 400 + 792)
    # Nothing is read after a prompt where each completion is one token.
    assert computed_positions([1] * 8, 2, 28, 0) == (8 * 28, 2 * 28)
    # Five rows that are 16 shorter would be a pass of their own for 80 positions of padding.
    lengths = [20] * 4 + [4] * 5
    assert [len(similar_lengths(lengths, least)) for least in (79, 80)] == [2, 1]
