"""The analysis of rewards: its numbers, what stands out, and its page."""

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tasks.reports.reward_analysis import analyse
from tasks.reports.reward_page import analysis_report, findings, render_reward_page
from tasks.reports.statistics import Statistics
from tasks.reports.text import visible
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_frames import made_scores
from tests.tasks.reports.made_runs import RunMaker
from tests.tasks.reports.test_run_page import EVIL, Page, check_offline

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


def test_signal_is_the_spread_that_siblings_have() -> None:
    # Within groups sqrt(2) * 0.05; over all of 0, 0.1, 0.9, 1.
    values = [0.0, 0.1, 0.9, 1.0]
    reward = one(made_scores("aabb", {"x": values}))
    assert reward["spread"]["within_groups"] == pytest.approx(math.sqrt(0.005))
    assert reward["signal_ratio"] == pytest.approx(math.sqrt(0.005) / np.std(values, ddof=1))
    assert one(made_scores("aabb", {"x": [0.2, 0.2, 0.8, 0.8]}))["signal_ratio"] == 0.0
    assert one(made_scores("aabb", {"x": [0.5] * 4}))["signal_ratio"] is None
    assert one(made_scores("abcd", {"x": values}))["signal_ratio"] is None


def test_samples_a_reward_does_not_apply_to_are_no_failures() -> None:
    failures = {"x": ["timeout", None, "timeout", "refused", None]}
    reward = one(made_scores("aaaaa", {"x": [None, None, None, None, 0.5]}, failures=failures))
    counts = (reward["spread"]["samples"], reward["spread"]["values"], reward["not_applicable"], reward["failures"])
    assert counts == (5, 1, 1, 3)
    assert list(reward["failure_reasons"].items()) == [("timeout", 2), ("refused", 1)]


def test_cost_by_hand() -> None:
    cost = one(made_scores("a" * 5, {"x": [0.5] * 5}, seconds=[1.0, 2.0, 3.0, 4.0, None]))["cost"]
    p95 = np.quantile([1, 2, 3, 4], 0.95)
    assert cost == {"total": 10.0, "mean": 2.5, "median": 2.5, "p95": pytest.approx(p95)}
    assert one(made_scores("a", {"x": [0.5]}, seconds=[None]))["cost"] is None


def test_trend_is_by_iteration_and_raw_values_have_their_own_unit() -> None:
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


@pytest.mark.parametrize(("again", "share"), [(0.3, 0.5), (0.1 + 0.2, 0.0)])
def test_the_last_bit_is_noise(again: float, share: float) -> None:
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


def test_failures_are_counted_by_reason() -> None:
    failures = {"x": ["timeout", "timeout", "refused"] + [None] * 5}
    scores = made_scores(GROUPS, {"x": [None, None, None, *HEALTHY[3:]]}, failures=failures)
    assert "3 samples (37.5%): timeout (2); refused (1)" in findings(analyse(scores))[0][1]


def test_noise_is_a_finding_where_it_is_large() -> None:
    scores, values = made_scores(GROUPS, {"x": HEALTHY}), np.array(HEALTHY)
    assert findings(analyse(scores)) == []
    assert findings(analyse(scores, made_scores(GROUPS, {"x": (values + 0.01).tolist()}))) == []
    ((_, noisy),) = findings(analyse(scores, made_scores(GROUPS, {"x": (values + 0.1).tolist()})))
    assert "differ by 0.1 on average" in noisy
    ((_, lost),) = findings(analyse(scores, made_scores(GROUPS, {"x": [None, *HEALTHY[1:]]})))
    assert "1 sample" in lost


def test_pairs_that_count_twice_or_pull_apart() -> None:
    rewards = {"x": HEALTHY, "y": [value**2 for value in HEALTHY], "z": [1 - value for value in HEALTHY]}
    found = findings(analyse(made_scores(GROUPS, rewards)))
    expected = [("x and y", "correlation 1.00"), ("x and z", "correlation -1.00"), ("y and z", "correlation -1.00")]
    assert [subject for subject, _ in found] == [subject for subject, _ in expected]
    assert all(number in text for (_, text), (_, number) in zip(found, expected, strict=True))


def page(scores: pl.DataFrame, folder: Path, repeats: pl.DataFrame | None = None, title: str = "Rewards") -> str:
    """The page of scores, with a run that has a guardrail."""
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


def test_labels_titles_and_reasons_are_data(tmp_path: Path) -> None:
    label = EVIL + " $x^2$ \\frac{a}"
    scores = made_scores("aa", {label: [None, 0.5], "x": [0.1, 0.2]}, failures={label: [EVIL, None]}, iterations=[1, 2])
    text = "".join(check_offline(page(scores, tmp_path, title=EVIL)).text)
    # Title, heading, the reward's row, its pair, of its two findings the subjects and one reason, and its plot.
    assert text.count(visible(EVIL)) == 2 + 1 + 1 + 2 + 1 + 1
