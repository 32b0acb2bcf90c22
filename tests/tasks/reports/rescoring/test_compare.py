import json
import math

import numpy as np
import polars as pl
import pytest

from tasks.reports.rescoring.compare import compare
from tests.tasks.reports.rescoring.made_samples import made


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
