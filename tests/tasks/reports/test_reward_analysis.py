import json
import math

import numpy as np
import polars as pl
import pytest

from tasks.reports.reward_analysis import Agreement, IterationMean, RewardMetrics, agreements_of, analyse
from tests.tasks.reports.made_scores import made


def one(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> RewardMetrics:
    (reward,) = analyse(scores, repeats).rewards
    return reward


def test_saturation_by_hand() -> None:
    edge = one(made("aaaaa", {"x": [0.0, 1e-7, 1.0, 1 - 1e-7, 0.5]})).saturation
    assert edge is not None
    assert (edge.at_floor, edge.at_ceiling, edge.at_highest) == (0.4, 0.4, 0.4)
    unbounded = one(made("aaaa", {"x": [7.0, 7.0, -3.0, 1.0]})).saturation
    assert unbounded is not None
    assert (unbounded.at_floor, unbounded.at_ceiling, unbounded.at_highest) == (0.0, 0.25, 0.5)


def test_signal_is_the_spread_that_siblings_have() -> None:
    # Within groups sqrt(2) * 0.05; over all of 0, 0.1, 0.9, 1.
    values = [0.0, 0.1, 0.9, 1.0]
    reward = one(made("aabb", {"x": values}))
    assert reward.spread.within_groups == pytest.approx(math.sqrt(0.005))
    assert reward.signal_ratio == pytest.approx(math.sqrt(0.005) / np.std(values, ddof=1))
    assert one(made("aabb", {"x": [0.2, 0.2, 0.8, 0.8]})).signal_ratio == 0.0
    assert one(made("aabb", {"x": [0.5] * 4})).signal_ratio is None
    assert one(made("abcd", {"x": values})).signal_ratio is None


def test_samples_a_reward_does_not_apply_to_are_no_failures() -> None:
    failures = {"x": ["timeout", None, "timeout", "refused", None]}
    reward = one(made("aaaaa", {"x": [None, None, None, None, 0.5]}, failures=failures))
    assert (reward.spread.samples, reward.spread.values, reward.not_applicable, reward.failures) == (5, 1, 1, 3)
    assert list(reward.failure_reasons.items()) == [("timeout", 2), ("refused", 1)]


def test_cost_by_hand() -> None:
    cost = one(made("a" * 5, {"x": [0.5] * 5}, seconds=[1.0, 2.0, 3.0, 4.0, None])).cost
    assert cost is not None
    assert (cost.total, cost.mean, cost.median) == (10.0, 2.5, 2.5)
    assert cost.p95 == pytest.approx(np.quantile([1, 2, 3, 4], 0.95))
    assert one(made("a", {"x": [0.5]}, seconds=[None])).cost is None


def test_trend_is_by_iteration() -> None:
    reward = one(made("abcd", {"x": [0.4, 0.2, 0.8, None]}, iterations=[2, 1, 2, 3]))
    assert reward.trend == (
        IterationMean(1, 0.2, 1),
        IterationMean(2, pytest.approx(0.6), 2),
        IterationMean(3, None, 0),
    )


def test_noise_is_joined_by_sample_and_reward() -> None:
    scores = made("aabb", {"x": [0.1, 0.3, 0.5, 0.7], "y": [0.1, 0.2, 0.3, 0.4]})
    repeats = made("aabb", {"x": [0.1, 0.4, 0.3, None]}).filter(pl.col("sample_id") != "s0").reverse()
    x, y = analyse(scores, repeats).rewards
    assert x.noise is not None
    assert (x.noise.pairs, x.noise.one_sided, x.noise.share_differing) == (2, 1, 1.0)
    assert (x.noise.mean_difference, x.noise.max_difference) == (pytest.approx(0.15), pytest.approx(0.2))
    assert x.noise_to_spread == pytest.approx(0.15 / math.sqrt(0.02))
    assert y.noise is None
    assert one(scores.filter(pl.col("label") == "x")).noise is None


@pytest.mark.parametrize(("again", "share"), [(0.3, 0.5), (0.1 + 0.2, 0.0)])
def test_the_last_bit_is_noise(again: float, share: float) -> None:
    noise = one(made("aa", {"x": [0.1 + 0.2, 0.5]}), made("aa", {"x": [again, 0.5]})).noise
    assert noise is not None
    assert noise.share_differing == share


def test_labels_may_be_any_words() -> None:
    scores = made("aaa", {"run": [0.1, 0.2, 0.3], "group": [0.1, 0.2, 0.3], "sample_id": [0.3, 0.2, 0.1]})
    found = analyse(scores)
    assert [reward.label for reward in found.rewards] == ["run", "group", "sample_id"]
    assert found.agreement("group", "run").ranks.overall == pytest.approx(1.0)
    assert found.agreement("run", "sample_id").ranks.overall == pytest.approx(-1.0)


def test_raw_values_are_in_their_own_unit() -> None:
    reward = one(made("aaa", {"x": [0.1, 0.2, 0.6]}))
    assert reward.raw is not None
    assert (reward.raw.minimum, reward.raw.median, reward.raw.maximum) == pytest.approx((1.0, 2.0, 6.0))


def test_the_summary_is_json_without_nan() -> None:
    rewards = {"null": [None] * 4, "nan": [math.nan, math.inf, -math.inf, 0.5], "flat": [0.5] * 4}
    found = analyse(made("aabc", rewards, seconds=[math.nan, None, 1.0, 2.0]), made("aabc", rewards))
    summary = found.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    null, nan, flat = found.rewards
    assert (null.values, null.saturation, null.histogram, null.noise) == (None, None, None, None)
    assert (nan.spread.values, nan.not_applicable, nan.spread.std) == (1, 3, None)
    assert (flat.spread.std, flat.spread.groups_without_spread, flat.signal_ratio) == (0.0, 1.0, None)


def test_scores_that_cannot_be_analysed_are_refused() -> None:
    scores = made("aa", {"x": [0.1, 0.2]})
    twice = pl.concat([scores, scores.head(1)])
    for frame, repeats, word in ((scores.clear(), None, "empty"), (scores.drop("seconds"), None, "seconds")):
        with pytest.raises(ValueError, match=word):
            analyse(frame, repeats)
    with pytest.raises(ValueError, match=r"repeats .*'s0'"):
        analyse(scores, twice)


def agreement(groups: list[int], first: list[float | None], second: list[float | None]) -> Agreement:
    numbers = {"a": pl.Series(first, dtype=pl.Float64), "b": pl.Series(second, dtype=pl.Float64)}
    (found,) = agreements_of(pl.DataFrame({"group": groups, **numbers}), [("first", "a"), ("second", "b")])
    return found


def test_sides_of_the_mean_by_hand() -> None:
    # Off the mean by -1, 0, 1 and by -2, -1, 3: the middle one lies on the mean by one of them.
    found = agreement([0, 0, 0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    assert (found.centred, found.same_sign) == (2, 1.0)
    found = agreement([0, 0, 1, 1], [1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 9.0, 3.0])
    assert (found.centred, found.same_sign) == (4, 0.5)


def test_means_are_of_those_that_have_both() -> None:
    # The sibling without a second value would move the first one's mean above 2.
    found = agreement([0, 0, 0], [1.0, 2.0, 90.0], [5.0, 6.0, None])
    assert (found.ranks.pairs, found.centred, found.same_sign) == (2, 2, 1.0)
    found = agreement([0, 0], [1.0, None], [None, 2.0])
    assert (found.ranks.pairs, found.ranks.overall, found.centred, found.same_sign) == (0, None, 0, None)


def test_samples_on_their_groups_mean_have_no_side() -> None:
    found = agreement([0] * 3 + [1] * 3, [0.1] * 3 + [0.1, 0.2, 0.6], [1.0, 2.0, 3.0, 0.7, 0.7, 0.7])
    assert (found.centred, found.same_sign, found.ranks.within_groups) == (0, None, None)
    # The middle one is the mean of the three, but not in floating point.
    assert agreement([0] * 3, [0.1, 0.2, 0.3], [0.0, 0.9, 0.3]).centred == 2


def test_every_pair_once() -> None:
    frame = pl.DataFrame({"group": [0, 0], "a": [1.0, 2.0], "b": [2.0, 1.0], "c": [1.0, 2.0]})
    found = agreements_of(frame, [("A", "a"), ("B", "b"), ("C", "c")])
    assert [(pair.first, pair.second, pair.same_sign) for pair in found] == [
        ("A", "B", 0.0),
        ("A", "C", 1.0),
        ("B", "C", 0.0),
    ]
    assert found[0].ranks.overall == pytest.approx(-1.0)
