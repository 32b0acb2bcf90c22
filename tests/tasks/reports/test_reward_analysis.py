"""The analysis of rewards: its numbers, what stands out, and its page."""

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import spearmanr

from tasks.reports.reward_analysis import analyse, analysis_report, findings, render_reward_page
from tasks.reports.statistics import BINS, Statistics, histogram_of, quantiles_of, rank_agreement, rounded, spread_of
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_frames import made_scores
from tests.tasks.reports.made_runs import RunMaker
from tests.tasks.reports.test_run_page import Page, check_offline

GROUPS = "a" * 4 + "b" * 4
HEALTHY = [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]


def one(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> Statistics:
    (reward,) = analyse(scores, repeats)["rewards"]
    return dict(reward)


@pytest.mark.parametrize(
    ("values", "shares"),
    [([0.0, 1e-7, 1.0, 1 - 1e-7, 0.5], [0.4, 0.4, 0.4]), ([7.0, 7.0, -3.0, 1.0], [0.0, 0.25, 0.5])],
)
def test_saturation_by_hand(values: list[float], shares: list[float]) -> None:
    edges = one(made_scores("a" * len(values), {"x": values}))["saturation"]
    assert [edges["at_floor"], edges["at_ceiling"], edges["at_highest"]] == shares


def test_signal_and_failures_by_hand() -> None:
    # Within groups sqrt(2) * 0.05; over all of 0, 0.1, 0.9, 1.
    values = [0.0, 0.1, 0.9, 1.0]
    reward = one(made_scores("aabb", {"x": values}))
    assert reward["spread"]["within_groups"] == pytest.approx(math.sqrt(0.005))
    assert reward["signal_ratio"] == pytest.approx(math.sqrt(0.005) / np.std(values, ddof=1))
    assert one(made_scores("aabb", {"x": [0.2, 0.2, 0.8, 0.8]}))["signal_ratio"] == 0.0
    assert one(made_scores("aabb", {"x": [0.5] * 4}))["signal_ratio"] is None
    assert one(made_scores("abcd", {"x": values}))["signal_ratio"] is None
    # A sample that a reward does not apply to is no failure.
    failures = {"x": ["timeout", None, "timeout", "refused", None]}
    reward = one(made_scores("aaaaa", {"x": [None, None, None, None, 0.5]}, failures=failures))
    counts = (reward["spread"]["samples"], reward["spread"]["values"], reward["not_applicable"], reward["failures"])
    assert counts == (5, 1, 1, 3)
    assert list(reward["failure_reasons"].items()) == [("timeout", 2), ("refused", 1)]


def test_cost_trend_and_raw_values_by_hand() -> None:
    cost = one(made_scores("a" * 5, {"x": [0.5] * 5}, seconds=[1.0, 2.0, 3.0, 4.0, None]))["cost"]
    p95 = np.quantile([1, 2, 3, 4], 0.95)
    assert cost == {"total": 10.0, "mean": 2.5, "median": 2.5, "p95": pytest.approx(p95)}
    assert one(made_scores("a", {"x": [0.5]}, seconds=[None]))["cost"] is None
    reward = one(made_scores("abcd", {"x": [0.4, 0.2, 0.8, None]}, iterations=[2, 1, 2, 3]))
    assert reward["trend"] == [
        {"iteration": 1, "mean": 0.2, "values": 1},
        {"iteration": 2, "mean": pytest.approx(0.6), "values": 2},
        {"iteration": 3, "mean": None, "values": 0},
    ]
    raw = reward["raw"]
    assert (raw["minimum"], raw["median"], raw["maximum"]) == pytest.approx((2.0, 4.0, 8.0))


def test_noise_is_joined_by_sample_and_reward() -> None:
    scores = made_scores("aabb", {"x": [0.1, 0.3, 0.5, 0.7], "y": [0.1, 0.2, 0.3, 0.4]})
    repeats = made_scores("aabb", {"x": [0.1, 0.4, 0.3, None]}).filter(pl.col("sample_id") != "s0").reverse()
    x, y = analyse(scores, repeats)["rewards"]
    assert x["noise"] == {
        "pairs": 2,
        "mean_difference": pytest.approx(0.15),
        "max_difference": pytest.approx(0.2),
        "share_differing": 1.0,
        "one_sided": 1,
    }
    assert x["noise_to_spread"] == pytest.approx(0.15 / math.sqrt(0.02))
    assert y["noise"] is None
    assert one(scores.filter(pl.col("label") == "x"))["noise"] is None
    # The last bit is noise.
    for again, share in ((0.3, 0.5), (0.1 + 0.2, 0.0)):
        noise = one(made_scores("aa", {"x": [0.1 + 0.2, 0.5]}), made_scores("aa", {"x": [again, 0.5]}))["noise"]
        assert noise["share_differing"] == share


def test_labels_may_be_any_words_and_every_pair_is_compared_once() -> None:
    rewards = {"run": [0.1, 0.2, 0.3], "group": [0.1, 0.2, 0.3], "sample_id": [0.3, 0.2, 0.1]}
    pairs = analyse(made_scores("aaa", rewards))["agreements"]
    found = [(pair["first"], pair["second"], round(pair["ranks"]["overall"]), pair["same_sign"]) for pair in pairs]
    assert found == [("run", "group", 1, 1.0), ("run", "sample_id", -1, 0.0), ("group", "sample_id", -1, 0.0)]


def test_an_analysis_is_json_without_nan() -> None:
    rewards = {"null": [None] * 4, "nan": [math.nan, math.inf, -math.inf, 0.5], "flat": [0.5] * 4}
    found = analyse(made_scores("aabc", rewards, seconds=[math.nan, None, 1.0, 2.0]), made_scores("aabc", rewards))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    null, nan, flat = found["rewards"]
    assert (null["values"], null["saturation"], null["noise"]) == (None, None, None)
    assert (nan["spread"]["values"], nan["not_applicable"], nan["spread"]["std"]) == (1, 3, None)
    assert (flat["spread"]["std"], flat["spread"]["groups_without_spread"], flat["signal_ratio"]) == (0.0, 1.0, None)
    with pytest.raises(ValueError, match="empty"):
        analyse(made_scores("aa", {"x": [0.1, 0.2]}).clear())


@pytest.mark.parametrize(
    ("groups", "first", "second", "centred", "same"),
    [
        # Off the mean by -1, 0, 1 and by -2, -1, 3: the middle one lies on the mean by one of them.
        ("aaa", [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], 2, 1.0),
        ("aabb", [1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 9.0, 3.0], 4, 0.5),
        # The sibling without a second value would move the first one's mean above 2.
        ("aaa", [1.0, 2.0, 90.0], [5.0, 6.0, None], 2, 1.0),
        ("aa", [1.0, None], [None, 2.0], 0, None),
        # Samples on their group's mean have no side.
        ("aaabbb", [0.1] * 3 + [0.1, 0.2, 0.6], [1.0, 2.0, 3.0, 0.7, 0.7, 0.7], 0, None),
        # The middle one is the mean of the three, but not in floating point.
        ("aaa", [0.1, 0.2, 0.3], [0.0, 0.9, 0.3], 2, 0.5),
    ],
)
def test_sides_of_the_mean_by_hand(
    groups: str, first: list[float | None], second: list[float | None], centred: int, same: float | None
) -> None:
    (pair,) = analyse(made_scores(groups, {"a": first, "b": second}))["agreements"]
    assert (pair["centred"], pair["same_sign"]) == (centred, same)


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ([0.5] * 4 + HEALTHY[4:], "50.0%"),
        ([1.0, 1.0, 0.5, 0.2] * 2, "ceiling, 1, for 50.0%"),
        ([0.0, 0.0, 0.0, 0.2] * 2, "floor, 0, for 75.0%"),
        ([None] * 8, "no value"),
        ([0.1, 0.101, 0.102, 0.103, 0.9, 0.901, 0.902, 0.903], "0.003"),
    ],
)
def test_each_finding_has_its_number(values: list[float | None], number: str) -> None:
    ((subject, text),) = findings(analyse(made_scores(GROUPS, {"x": values})))
    assert subject == "x"
    assert number in text


def test_failures_by_reason_and_pairs_that_count_twice_or_pull_apart() -> None:
    failures = {"x": ["timeout", "timeout", "refused"] + [None] * 5}
    scores = made_scores(GROUPS, {"x": [None, None, None, *HEALTHY[3:]]}, failures=failures)
    assert "3 samples (37.5%): timeout (2); refused (1)" in findings(analyse(scores))[0][1]
    rewards = {"x": HEALTHY, "y": [value**2 for value in HEALTHY], "z": [1 - value for value in HEALTHY]}
    found = findings(analyse(made_scores(GROUPS, rewards)))
    expected = [("x and y", "correlation 1.00"), ("x and z", "correlation -1.00"), ("y and z", "correlation -1.00")]
    assert [subject for subject, _ in found] == [subject for subject, _ in expected]
    assert all(number in text for (_, text), (_, number) in zip(found, expected, strict=True))


def test_noise_is_a_finding_where_it_is_large() -> None:
    scores, values = made_scores(GROUPS, {"x": HEALTHY}), np.array(HEALTHY)
    assert findings(analyse(scores)) == []
    assert findings(analyse(scores, made_scores(GROUPS, {"x": (values + 0.01).tolist()}))) == []
    ((_, noisy),) = findings(analyse(scores, made_scores(GROUPS, {"x": (values + 0.1).tolist()})))
    assert "differ by 0.1 on average" in noisy
    ((_, lost),) = findings(analyse(scores, made_scores(GROUPS, {"x": [None, *HEALTHY[1:]]})))
    assert "1 sample" in lost


def page(scores: pl.DataFrame, folder: Path, repeats: pl.DataFrame | None = None, title: str = "Rewards") -> str:
    maker, analysis = RunMaker(folder), analyse(scores, repeats)
    for version in (0, 1):
        maker.evaluation(version, shift=0.0)
        maker.guardrail(version, "jpeg", 0.5 + version)
    run = read_run(RunReader(maker.store))
    return render_reward_page(analysis_report(analysis, title, ["fell"]), analysis, scores, run)


def test_metrics_and_plots_in_a_page_that_opens_offline(tmp_path: Path) -> None:
    rewards = {"x": [0.0, 1.0, 0.25, 0.75], "y": [0.0, 1.0, 0.75, 0.25]}
    scores = made_scores("aabb", rewards, seconds=2.0, iterations=[1, 1, 2, 2])
    html = check_offline(page(scores, tmp_path, scores))
    labels = [svg["aria-label"] for svg in html.named("svg")]
    curves = [f"{name} over iterations" for name in ("x: mean", "y: mean", "Held-out reward", "Guardrails")]
    assert labels == ["Value", "Value", *curves]
    text = " ".join(" ".join(html.text).split())
    assert "Rewards, 4 samples in 2 groups" in text
    assert "x 0.5 ± 0.4564 0 | 0.5 | 1 25.0% | 25.0% | 25.0% 0.0% | 0 0.0% 0.5303 | 1.16 0 | 0 2 | 2" in text
    assert "x, y 0.80 0.00 50.0% 4" in text
    assert "signs of reward hacking fell" in text
    assert "1 sample: value 0.250 to 0.275" in text
    assert "jpeg, iteration 1: 1.5" in text
    assert "noise is not known" not in text


def test_a_single_reward_has_no_agreement(tmp_path: Path) -> None:
    text = " ".join(Page(page(made_scores("a", {"x": [0.5]}), tmp_path)).text)
    assert "Spearman" not in text
    assert "noise is not known" in text


def column(*values: float | None) -> list[float | None]:
    frame = pl.DataFrame({"a": pl.Series(values, dtype=pl.Float64)})
    return rounded(frame, ["a"])["a"].to_list()


@pytest.mark.parametrize("values", [(0.1 + 0.2, 0.3), (1e-17, 0.0, 0.5), (1e6 * (0.1 + 0.2), 3e5)])
def test_rounding_makes_no_difference(values: tuple[float, ...]) -> None:
    first, second, *_ = column(*values)
    assert first == second
    assert column(0.3, 0.3 + 1e-9) == [0.3, 0.3 + 1e-9]
    assert column(1e-20, 2e-20) == pytest.approx([1e-20, 2e-20])
    assert column(math.nan, math.inf, -math.inf, None, 1.0) == [None, None, None, None, 1.0]


def spread(groups: list[int], values: list[float | None]) -> Statistics:
    return spread_of(pl.DataFrame({"group": groups, "a": pl.Series(values, dtype=pl.Float64)}), "a")


NAMES = ("samples", "values", "null_share", "mean", "std", "within_groups", "groups", "groups_without_spread")


@pytest.mark.parametrize(
    ("groups", "values", "expected"),
    [
        # Deviations: of group 0 sqrt(2), of group 1 zero; group 2 has one value, group 3 none.
        (
            [0, 0, 1, 1, 2, 2, 3],
            [1, 3, 5, 5, 7, None, None],
            (7, 5, 2 / 7, 21 / 5, math.sqrt(5.2), math.sqrt(2) / 2, 3, 2 / 3),
        ),
        ([0, 1], [1, 2], (2, 2, 0.0, 1.5, math.sqrt(0.5), None, 2, 1.0)),
        ([0, 0], [None, None], (2, 0, 1.0, None, None, None, 0, None)),
        ([], [], (0, 0, None, None, None, None, 0, None)),
        # Equal to the last bit.
        ([0] * 7, [0.1] * 7, (7, 7, 0.0, 0.1, 0.0, 0.0, 1, 1.0)),
    ],
)
def test_spread_by_hand(groups: list[int], values: list[float | None], expected: tuple[float | None, ...]) -> None:
    found = spread(groups, values)
    assert found == pytest.approx(dict(zip(NAMES, expected, strict=True)))
    assert (found["std"] == 0) == (expected[4] == 0)


def pairs(groups: list[int], first: list[float | None], second: list[float | None]) -> pl.DataFrame:
    numbers = {"a": pl.Series(first, dtype=pl.Float64), "b": pl.Series(second, dtype=pl.Float64)}
    return pl.DataFrame({"group": groups, **numbers})


def test_ranks_agree_as_scipy_says_and_by_hand() -> None:
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(40), 8)
    first = np.round(random.normal(size=320) + groups / 20, 1)  # rounded, so that there are ties
    second = np.round(first + random.normal(size=320), 1)
    found = rank_agreement(pairs(groups.tolist(), first.tolist(), second.tolist()), "a", "b")
    assert found["overall"] == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    within = [spearmanr(first[groups == group], second[groups == group]).statistic for group in range(40)]
    assert found["within_groups"] == pytest.approx(np.mean(within), abs=1e-12)
    assert (found["pairs"], found["groups"], found["groups_undefined"]) == (320, 40, 0)
    # Group 0 keeps its order, group 1 reverses it, group 2 is constant on one side, group 3 has a single pair.
    found = rank_agreement(
        pairs([0, 0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 3, 1, 2, 5, 5, 9, None], [10, 20, 30, 2, 1, 1, 2, 4, 7]), "a", "b"
    )
    assert found["within_groups"] == pytest.approx(0.0)
    assert (found["pairs"], found["groups"], found["groups_undefined"]) == (8, 2, 2)
    for first, second in (
        ([1.0, 1.0], [1.0, 2.0]),
        ([1.0, 2.0], [3.0, 3.0]),
        ([1.0], [2.0]),
        ([None], [None]),
        ([], []),
    ):
        found = rank_agreement(pairs([0] * len(first), first, second), "a", "b")
        assert (found["overall"], found["within_groups"]) == (None, None)


def test_numpy_agrees_on_quantiles() -> None:
    values = np.random.default_rng(0).normal(size=777)
    found = quantiles_of(pl.Series([*values, None]))
    expected = np.quantile(values, [0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1])
    assert list(found.values()) == pytest.approx(expected.tolist())
    nothing = pl.Series([None, None], dtype=pl.Float64)
    assert (quantiles_of(nothing), histogram_of(nothing)) == (None, None)


@pytest.mark.parametrize(
    ("values", "ends", "bins"),
    [([0.31, 0.61, 1.0, None], (0.0, 1.0), [12, 24, BINS - 1]), ([7.0, 7.0], (6.5, 7.5), [20])],
)
def test_the_scale_of_a_histogram(values: list[float | None], ends: tuple[float, float], bins: list[int]) -> None:
    histogram = histogram_of(pl.Series(values))
    counts, edges = histogram
    assert (edges[0], edges[-1], len(edges)) == (*ends, BINS + 1)
    assert np.flatnonzero(counts).tolist() == bins
