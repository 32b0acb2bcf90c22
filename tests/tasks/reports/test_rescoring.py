import json
import math

import numpy as np
import polars as pl
import pytest

from tasks.reports.rescoring import HEADINGS, advantage_rows, compare, moved_most, reward_rows
from tests.tasks.reports.made_samples import made


def test_means_spread_and_order_by_hand() -> None:
    found = compare(made("aabb", [0.0, 1.0, 0.5, 0.5], [1.0, 0.0, 0.2, 0.4])).combined
    assert found.before is not None
    assert found.after is not None
    assert (found.before.mean, found.after.mean) == (pytest.approx(0.5), pytest.approx(0.4))
    assert found.before.within_groups == pytest.approx(math.sqrt(0.5) / 2)
    assert found.after.within_groups == pytest.approx((math.sqrt(0.5) + math.sqrt(0.02)) / 2)
    assert (found.before.groups_without_spread, found.after.groups_without_spread) == (0.5, 0.0)
    assert found.own is not None
    # Ranks 1, 4, 2.5, 2.5 and 4, 1, 2, 3; in group a reversed, in group b not defined.
    assert found.own.overall == pytest.approx(np.corrcoef([1, 4, 2.5, 2.5], [4, 1, 2, 3])[0, 1])
    assert (found.own.within_groups, found.own.groups_undefined) == (pytest.approx(-1.0), 1)


def test_advantages_by_hand() -> None:
    before = [1.0, -1.0, 2.0, -2.0, 0.0, 0.0, 3.0, None, 1.0, None]
    after = [-1.0, 1.0, 1.0, -1.0, 0.0, 5.0, 0.0, 1.0, None, None]
    found = compare(made("a" * 10, [0.5] * 10, [0.5] * 10, advantages=(before, after))).advantages
    assert (found.compared, found.gained, found.lost) == (7, 1, 1)
    assert (found.both_non_zero, found.turned) == (4, 0.5)
    assert (found.zero_before, found.from_zero, found.to_zero) == (2, 0.5, pytest.approx(1 / 5))
    assert (found.non_zero_before, found.non_zero_after) == (pytest.approx(5 / 7), pytest.approx(5 / 7))


def test_rewards_of_one_side_are_added_or_removed() -> None:
    rewards = {
        "before:old": [0.1, 0.2],
        "before:kept": [0.1, 0.2],
        "after:new": [0.9, 0.3],
        "after:kept": [0.2, 0.1],
    }
    kept, new, old = compare(made("aa", [0.1, 0.2], [0.3, 0.4], rewards=rewards)).rewards
    assert (kept.label, new.label, old.label) == ("kept", "new", "old")
    assert kept.own is not None
    assert kept.own.overall == pytest.approx(-1.0)
    assert (new.before, new.own, old.after, old.own) == (None, None, None, None)
    # Against the previous combined reward, which rises: the new one falls, the removed one rose with it.
    assert new.with_previous.overall == pytest.approx(-1.0)
    assert old.with_previous.overall == pytest.approx(1.0)


def test_a_reward_that_is_null_everywhere_and_one_sample() -> None:
    rewards = {"before:x": [None], "after:x": [math.nan]}
    found = compare(made("a", [0.5], [0.6], advantages=([None], [math.nan]), rewards=rewards))
    (change,) = found.rewards
    assert change.after is not None
    assert (change.after.mean, change.after.null_share) == (None, 1.0)
    assert found.combined.own is not None
    assert found.combined.own.overall is None
    assert (found.advantages.turned, found.advantages.non_zero_before) == (None, None)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of 2 samples .*1 have a reward before, 1 have a reward after"):
        compare(made("aa", [0.5, math.nan], [None, 0.5]))
    with pytest.raises(ValueError, match="none of 0 samples"):
        compare(made("", [], []))


def test_a_column_that_is_missing_or_a_sample_that_stands_twice_is_refused() -> None:
    samples = made("aa", [0.1, 0.2], [0.1, 0.2])
    with pytest.raises(ValueError, match="lack the columns prompt, reward_after"):
        compare(samples.drop("reward_after", "prompt"))
    with pytest.raises(ValueError, match="run 'run', sample_id 's0' more than once"):
        compare(pl.concat([samples, samples.head(1)]))


def test_the_same_names_in_two_runs_are_two_groups() -> None:
    samples = made("aabb", [0, 1, 0, 1], [0, 1, 1, 0], runs=["x", "x", "y", "y"])
    both = compare(samples.with_columns(group_id=pl.lit("g"), sample_id=pl.Series(["s0", "s1", "s0", "s1"])))
    assert (both.groups, both.runs) == (2, ("x", "y"))
    assert both.combined.own is not None
    assert both.combined.own.within_groups == pytest.approx(0.0)


def test_the_summary_is_json_without_nan() -> None:
    rewards = {"before:x": [None, math.inf, 0.5], "after:x": [0.5, 0.5, 0.5]}
    samples = made("abb", [0.5, 0.4, None], [0.5, 0.4, 0.3], rewards=rewards)
    summary = compare(samples).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["combined"]["after"]["mean"] == pytest.approx(0.4)


def test_an_order_that_only_rounding_changed_is_kept() -> None:
    before = [0.1 + 0.2, 0.3, 0.3, 0.5]
    after = [0.3, 0.1 + 0.2, 0.3, 0.5]
    own = compare(made("aaaa", before, after)).combined.own
    assert own is not None
    assert (own.overall, own.within_groups) == (pytest.approx(1.0), pytest.approx(1.0))


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


def test_no_more_than_requested() -> None:
    samples = made("a" * 50, [float(i) for i in range(50)], [float(-i) for i in range(50)])
    assert moved_most(samples).height == 20
    assert moved_most(samples, 3)["sample_id"].to_list() == ["s0", "s49", "s1"]


def test_groups_of_one_move_only_among_all_samples() -> None:
    moved = moved_most(made("abc", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]))
    assert moved.select("sample_id", "places", "points").rows() == [("s0", 0.0, 100.0), ("s2", 0.0, -100.0)]
    assert moved_most(made("a", [0.1], [0.3])).height == 0


def test_a_row_a_reward_with_both_sides() -> None:
    rewards = {"before:old": [0.1, 0.3], "after:new": [0.5, None]}
    rows = list(reward_rows(compare(made("aa", [0.1, 0.2], [0.4, 0.3], rewards=rewards))))
    assert rows[0] == (
        "combined",
        "0.150 → 0.350",
        "0.071 → 0.071",
        "0.0% → 0.0%",
        "0.0% → 0.0%",
        "-1.000 / -1.000",
        "-1.000 / -1.000",
    )
    assert rows[1] == ("new (added)", "0.500", "none", "100.0%", "50.0%", "", "none / none")
    assert rows[2] == ("old (removed)", "0.200", "0.141", "0.0%", "0.0%", "", "1.000 / 1.000")
    assert {len(row) for row in rows} == {len(HEADINGS)}


def test_advantages_in_words() -> None:
    advantages = ([1.0, -1.0, 0.0, None], [-1.0, 0.0, 1.0, 1.0])
    rows = advantage_rows(compare(made("aaaa", [0.1] * 4, [0.2] * 4, advantages=advantages)).advantages)
    shares = " ".join(value for _, value in rows)
    for share in ("100.0% of 1 ", "50.0% of 2 ", "0 before, 1 after"):
        assert share in shares
