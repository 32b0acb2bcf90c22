import pytest

from tasks.reports.rescoring.moved import moved_most
from tests.tasks.reports.rescoring.made_samples import made


def test_ranks_by_hand() -> None:
    # Ranks in group a: 1, 2, 3 -> 3, 1, 2; in group b, where two are equal: 1.5, 1.5 -> 2, 1.
    moved = moved_most(made("aaabb", [0.9, 0.8, 0.7, 0.5, 0.5], [0.1, 0.9, 0.8, 0.2, 0.3]))
    assert moved["sample_id"].to_list()[0] == "s0"
    by_name = {row["sample_id"]: row for row in moved.iter_rows(named=True)}
    assert [by_name[f"s{i}"]["rank_before"] for i in range(5)] == [1, 2, 3, 1.5, 1.5]
    assert [by_name[f"s{i}"]["rank_after"] for i in range(5)] == [3, 1, 2, 2, 1]
    assert [by_name[f"s{i}"]["places"] for i in range(5)] == [-2, 1, 1, -0.5, 0.5]
    assert [by_name[f"s{i}"]["siblings"] for i in range(5)] == [3, 3, 3, 2, 2]
    # Of all five: from the top, rank 5, to the bottom, rank 1.
    assert (by_name["s0"]["percentile_before"], by_name["s0"]["percentile_after"]) == (100.0, 0.0)
    assert (by_name["s3"]["percentile_before"], by_name["s3"]["percentile_after"]) == (12.5, 25.0)


def test_points_among_all_samples_break_ties() -> None:
    # Each group swaps its two: one place each; those of group b travel further among all samples.
    moved = moved_most(made("aabb", [0.4, 0.5, 0.1, 0.9], [0.5, 0.4, 0.9, 0.1]))
    assert moved["places"].abs().to_list() == [1.0] * 4
    assert moved["sample_id"].to_list() == ["s2", "s3", "s0", "s1"]
    assert moved["points"].to_list() == pytest.approx([100, -100, 100 / 3, -100 / 3])


def test_those_that_did_not_move_and_those_without_both_are_left_out() -> None:
    moved = moved_most(made("aaa", [0.1, 0.2, None], [0.1, 0.3, 0.2]))
    assert moved.height == 0
    # The sibling without a previous reward does not make room for others to move.
    moved = moved_most(made("aaa", [0.1, 0.2, None], [0.3, 0.1, 0.2]))
    assert moved.select("sample_id", "rank_after", "siblings").rows() == [("s0", 1.0, 2), ("s1", 2.0, 2)]


def test_no_more_than_asked_for() -> None:
    samples = made("a" * 50, [float(i) for i in range(50)], [float(-i) for i in range(50)])
    assert moved_most(samples).height == 20
    assert moved_most(samples, 3)["sample_id"].to_list() == ["s0", "s49", "s1"]


def test_groups_of_one_move_among_all_samples_only() -> None:
    moved = moved_most(made("abc", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]))
    assert moved.select("sample_id", "places", "points").rows() == [("s0", 0.0, 100.0), ("s2", 0.0, -100.0)]
    assert moved_most(made("a", [0.1], [0.3])).height == 0
