import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from grpo_core.errors import InputError
from tasks.reports.compare_page import render_compare_page
from tasks.reports.compared_runs import PairedDifference, Scores, interval, paired_difference
from tasks.reports.comparison import Comparison, compare_runs
from tasks.reports.statistics import (
    BINS,
    Statistics,
    histogram_of,
    quantiles_of,
    rank_agreement,
    rounded,
    spread_of,
)
from tasks.reports.text import visible
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import RunMaker, colour
from tests.tasks.reports.test_run_page import EVIL, check_offline, images

REPLAY = "replay: {source: a, advantages: mine}\n"


def identity(weight: float = 1.0, plan: str = "plan") -> dict[str, Any]:
    """What run.json says of a run's rewards and of its held-out prompts."""
    settings = {"rewards": {"ssim": {"weight": weight}}, "advantages": {"missing": "group_mean", "clip": weight}}
    return {"identity": {"settings": settings, "scores": [["{}", "[]"]], "code": {}}, "evaluation": plan}


def scored_by(function: str, version: str) -> dict[str, Any]:
    """What run.json says of a run with one reward, a function whose file has this digest."""
    settings = {"reward": "function", "settings": {"function": function}}
    origin = json.dumps({"reward": "function", "version": version, "weights": {}})
    mix = {"rewards": {"x": settings}, "advantages": {}}
    return {"identity": {"settings": mix, "scores": [[origin, "[]"]], "code": {}}}


def made(root: Path, name: str, shift: float, *, seed: int = 0, weight: float = 1.0, **options: Any) -> RunMaker:
    """A run of one iteration whose last policy scores `shift` more than 0.5 on average."""
    maker = RunMaker(root, name, planned=1, identity=options.pop("identity", identity(weight)), **options)
    maker.evaluation(0, shift=0.0, seed=seed)
    maker.iteration(1)
    maker.evaluation(1, shift=shift, seed=seed)
    return maker


def compared(*makers: RunMaker, evaluation: str | None = None) -> Comparison:
    readers = {maker.store.run: RunReader(maker.store) for maker in makers}
    return compare_runs(readers, {}, evaluation)


def test_the_same_prompts_and_seeds_are_paired_with_the_first_run(tmp_path: Path) -> None:
    first = made(tmp_path, "a", 0.0, settings="update: {learning_rate: 1.0, clip: null}\n")
    second = made(tmp_path, "b", 0.25, settings="update: {learning_rate: 2.0, beta: 3}\n")
    third = made(tmp_path, "c", -0.25, settings="update: {learning_rate: 1.0}\n")
    found = compared(first, second, third)
    rows = [(each.run, each.score, each.difference, each.prompts, each.samples) for each in found.differences]
    # Sibling 3 has no reward; ssim is the combined reward and is not repeated.
    assert rows == [("b", "reward", pytest.approx(0.25), 2, 6), ("c", "reward", pytest.approx(-0.25), 2, 6)]
    assert all(each.same_seeds for each in found.differences)
    assert found.settings == {"update.learning_rate": ("1.0", "2.0", "1.0"), "update.beta": (None, "3", None)}
    assert found.versions == {"a": 1, "b": 1, "c": 1}
    assert not found.omissions
    (heldout,) = (curve for curve in found.curves if curve.title == "Held-out reward")
    assert heldout.series["b"] == [(0.0, 0.5), (1.0, 0.75)]
    assert [list(groups) for groups in found.prompts] == [["a", "b", "c"]] * 2
    assert found.prompts[1]["c"].reward == pytest.approx(0.25)


ONE, OTHER = ("a.py:brevity", "1+aa"), ("a.py:warmth", "1+aa")


@pytest.mark.parametrize(
    ("first", "second", "differing"),
    [
        # Two functions of one file.
        ([ONE], [OTHER], {"rewards.brevity.settings.function", "rewards.warmth.settings.function"}),
        # Functions of one name in two files.
        ([ONE], [("b.py:brevity", "1+aa")], {"rewards.brevity.settings.function"}),
        # The same function, whose file was changed.
        ([ONE], [("a.py:brevity", "1+bb")], {"scores.brevity.version"}),
        # Two functions without names in each run, one of which differs.
        ([ONE, OTHER], [ONE, ("b.py:warmth", "1+bb")], {"rewards.warmth.settings.function", "scores.warmth.version"}),
        # The order of rewards is no difference.
        ([ONE, OTHER], [OTHER, ONE], set()),
        ([ONE], [ONE], set()),
    ],
)
def test_functions_without_names_are_told_apart(
    tmp_path: Path, first: list[tuple[str, str]], second: list[tuple[str, str]], differing: set[str]
) -> None:
    makers = []
    for name, functions in (("a", first), ("b", second)):
        sections = [{"reward": "function", "settings": {"function": function}} for function, _ in functions]
        each = scored_by(*functions[0])
        each["identity"]["scores"] = [scored_by(*one)["identity"]["scores"][0] for one in functions]
        makers.append(made(tmp_path, name, 0.0, identity=each, settings=f"rewards: {json.dumps(sections)}\n"))
    found = {path for path in compared(*makers).settings if path.startswith(("rewards", "scores"))}
    assert {path for path in found if not path.endswith(("reward", ".version")) or path in differing} == differing


@pytest.mark.parametrize(
    ("change", "scores", "said"),
    [
        (lambda root: made(root, "b", 0.25, seed=1000), ["reward"], "some held-out samples have other seeds"),
        (lambda root: made(root, "b", 0.25, weight=2.0), ["ssim"], "its combined reward is another mix than that of a"),
        (lambda root: made(root, "b", 0.25, identity=identity(plan="x")), ["reward"], "so no held-out curves"),
        (lambda root: made(root, "b", 0.25, identity={}), ["ssim"], "may be another mix than that of a"),
        (lambda root: made(root, "b", 0.25, prompts=("x", "y", "z")), ["reward"], "left out are 0 prompts of a and 1"),
        (lambda root: made(root, "b", 0.25, modality="text"), [], "b samples completions and a images"),
        (lambda root: RunMaker(root, "b", identity=identity()), [], "b has no stored evaluation"),
        (
            lambda root: made(root, "b", 0.25, settings=REPLAY),
            ["reward"],
            "b: trained on rescoring mine of a, a on its own",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, change: Callable[[Path], RunMaker], scores: list[str], said: str
) -> None:
    found = compared(made(tmp_path, "a", 0.0), change(tmp_path))
    assert [each.score for each in found.differences] == scores
    assert sum(said in each for each in found.omissions) == 1, found.omissions
    assert found.measure == (scores[0] if scores else None)
    assert bool(found.prompts) == bool(scores)


def test_scores_of_another_origin_are_not_compared(tmp_path: Path) -> None:
    second = RunMaker(tmp_path, "b", identity=identity(weight=2.0))
    second.provenance = '{"reward": "ssim", "version": "2"}'
    second.evaluation(0, shift=0.0)
    second.iteration(1)
    found = compared(made(tmp_path, "a", 0.0), second)
    assert not found.differences
    assert any("ssim has other settings, another version or other weights" in each for each in found.omissions)
    assert not any("ssim" in curve.title for curve in found.curves)


def test_an_evaluation_of_other_prompts_is_compared_where_it_is_named(tmp_path: Path) -> None:
    second = RunMaker(tmp_path, "b", identity=identity())
    second.first_prompt = 50
    second.evaluation(3, shift=0.0)
    assert any(
        "has no held-out prompt in common" in each for each in compared(made(tmp_path, "a", 0.0), second).omissions
    )
    second.first_prompt = 0
    place = "evaluations_of/theirs-0123abcd/000002"
    second.rollouts(place, "heldout")
    second.rewards(place, "heldout", 0.25)
    second.advantages(place, "heldout", shift=0.25)
    first = RunMaker(tmp_path, "a")
    assert compared(first, second).versions == {"a": 1, "b": 3}
    found = compared(first, second, evaluation="theirs-0123abcd")
    assert found.versions == {"a": 1, "b": 2}
    # Its mix may have been another one, so its single rewards are compared.
    assert [(each.score, each.difference) for each in found.differences] == [("ssim", pytest.approx(0.25))]


def test_versions_of_a_run_are_compared_where_only_one_was_evaluated_by_its_training(tmp_path: Path) -> None:
    maker = made(tmp_path, "a", 0.0)
    name = "own-0123abcd"
    place = f"evaluations_of/{name}/000002"
    maker.rollouts(place, "heldout")
    maker.rewards(place, "heldout", 0.25)
    maker.advantages(place, "heldout", shift=0.25)
    reader = RunReader(maker.store)
    readers, versions = {"a@1": reader, "a@2": reader}, {"a@1": 1, "a@2": 2}
    with pytest.raises(InputError) as caught:
        compare_runs(readers, versions)
    assert f"--evaluation {name}" in caught.value.hint
    found = compare_runs(readers, versions, name)
    assert found.versions == versions
    assert {each.score: each.difference for each in found.differences}["ssim"] == pytest.approx(0.25)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_page_shows_every_run_offline(tmp_path: Path, modality: Any) -> None:
    makers = [
        made(tmp_path, name, shift, modality=modality, prompts=(EVIL, "plain"))
        for name, shift in (("a", 0.0), ("b", 0.125))
    ]
    page = check_offline(render_compare_page(replace(compared(*makers), warnings=[EVIL])))
    text = "".join(page.text)
    assert "+0.125 to +0.125" in text
    assert text.count(visible(EVIL)) == 2
    assert "ranranran" not in text
    if modality == "image":
        shown = [image.convert("RGB").getpixel((0, 0)) for image in images(page)]
        assert sorted(shown) == sorted(2 * [colour(group, sibling) for group in (0, 1) for sibling in range(4)])
    else:
        assert text.count("answer 2 of group 1") == 2


def paired(first: Scores, second: Scores) -> PairedDifference | None:
    return paired_difference(first, second, run="r", score="reward", same_seeds=True)


def test_prompts_are_paired_by_hand() -> None:
    first = {"a": {1: 0.2, 2: 0.4}, "b": {1: 0.5}, "only here": {1: 9.0}}
    second = {"a": {1: 0.4, 2: 0.8, 3: 9.0}, "b": {1: 0.4}, "only there": {1: 9.0}}
    found = paired(first, second)
    assert found is not None
    assert found.by_prompt == {"a": pytest.approx(0.3), "b": pytest.approx(-0.1)}
    assert (found.first, found.second, found.difference) == pytest.approx((0.4, 0.5, 0.1))
    # 12.7062 is Student's t of one degree of freedom, and 0.2828 / sqrt(2) = 0.2 the standard error.
    assert (found.low, found.high) == pytest.approx((0.1 - 2.54124, 0.1 + 2.54124), abs=1e-5)
    assert (found.prompts, found.samples, found.higher, found.lower) == (2, 3, 1, 1)


def test_three_prompts_by_hand() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert interval([0.5, 0.5]) == (0.5, 0.5)
    assert interval([0.5]) is None


def test_without_a_common_seed_means_are_compared() -> None:
    found = paired({"a": {1: 1.0, 2: 3.0}}, {"a": {7: 5.0}})
    assert found is not None
    assert (found.difference, found.samples, found.low, found.high) == (3.0, 3, None, None)
    assert paired({"a": {1: 1.0}}, {"b": {1: 1.0}}) is None
    assert paired({"a": {1: 1.0}}, {"a": {}}) is None


def test_intervals_cover_as_often_as_they_say_if_the_prompt_is_the_unit() -> None:
    """Samples of a prompt share its effect; an interval over single samples takes them for independent."""
    random = np.random.default_rng(0)
    trials, prompts, samples, true = 1000, 12, 4, 0.3
    by_prompt, by_sample = 0, 0
    for _ in range(trials):
        differences = true + random.normal(0, 1, (prompts, 1)) + random.normal(0, 0.5, (prompts, samples))
        levels = random.normal(0, 5, (prompts, samples))
        first = {str(row): dict(enumerate(levels[row])) for row in range(prompts)}
        second = {str(row): dict(enumerate(levels[row] + differences[row])) for row in range(prompts)}
        found = paired(first, second)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        by_prompt += found.low <= true <= found.high
        ends = interval(differences.ravel())
        assert ends is not None
        by_sample += ends[0] <= true <= ends[1]
    assert 0.93 <= by_prompt / trials <= 0.97
    assert by_sample / trials < 0.8


def column(*values: float | None) -> list[float | None]:
    frame = pl.DataFrame({"a": pl.Series(values, dtype=pl.Float64)})
    return rounded(frame, ["a"])["a"].to_list()


@pytest.mark.parametrize("values", [(0.1 + 0.2, 0.3), (1e-17, 0.0, 0.5), (1e6 * (0.1 + 0.2), 3e5)])
def test_rounding_makes_no_difference(values: tuple[float, ...]) -> None:
    first, second, *_ = column(*values)
    assert first == second


def test_different_values_stay_different() -> None:
    assert column(0.3, 0.3 + 1e-9) == [0.3, 0.3 + 1e-9]
    assert column(1e-20, 2e-20) == pytest.approx([1e-20, 2e-20])


def test_values_that_are_not_finite_become_null() -> None:
    assert column(math.nan, math.inf, -math.inf, None, 1.0) == [None, None, None, None, 1.0]
    assert column(None, math.nan) == [None, None]
    assert rounded(pl.DataFrame({"a": [None, None]}), ["a"])["a"].dtype == pl.Float64


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
    ],
)
def test_spread_by_hand(groups: list[int], values: list[float | None], expected: tuple[float | None, ...]) -> None:
    assert spread(groups, values) == pytest.approx(dict(zip(NAMES, expected, strict=True)))


def test_equal_values_have_no_spread_to_the_last_bit() -> None:
    found = spread([0] * 7, [0.1] * 7)
    assert (found["std"], found["within_groups"], found["groups_without_spread"]) == (0.0, 0.0, 1.0)


def pairs(groups: list[int], first: list[float | None], second: list[float | None]) -> pl.DataFrame:
    numbers = {"a": pl.Series(first, dtype=pl.Float64), "b": pl.Series(second, dtype=pl.Float64)}
    return pl.DataFrame({"group": groups, **numbers})


def test_scipy_agrees_over_all_and_within_groups() -> None:
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(40), 8)
    first = np.round(random.normal(size=320) + groups / 20, 1)  # rounded, so that there are ties
    second = np.round(first + random.normal(size=320), 1)
    found = rank_agreement(pairs(groups.tolist(), first.tolist(), second.tolist()), "a", "b")
    assert found["overall"] == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    within = [spearmanr(first[groups == group], second[groups == group]).statistic for group in range(40)]
    assert found["within_groups"] == pytest.approx(np.mean(within), abs=1e-12)
    assert (found["pairs"], found["groups"], found["groups_undefined"]) == (320, 40, 0)


def test_ranks_by_hand() -> None:
    # Group 0 keeps its order, group 1 reverses it, group 2 is constant on one side, group 3 has a single pair.
    found = rank_agreement(
        pairs([0, 0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 3, 1, 2, 5, 5, 9, None], [10, 20, 30, 2, 1, 1, 2, 4, 7]), "a", "b"
    )
    assert found["within_groups"] == pytest.approx(0.0)
    assert (found["pairs"], found["groups"], found["groups_undefined"]) == (8, 2, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [2.0]), ([None], [None]), ([], [])],
)
def test_without_spread_there_is_no_correlation(first: list[float | None], second: list[float | None]) -> None:
    found = rank_agreement(pairs([0] * len(first), first, second), "a", "b")
    assert (found["overall"], found["within_groups"]) == (None, None)


triples = st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=40)


@given(triples)
def test_only_the_order_counts(rows: list[tuple[int, int, int]]) -> None:
    groups, first, second = (list(column) for column in zip(*rows, strict=True))
    plain = rank_agreement(pairs(groups, first, second), "a", "b")
    bent = rank_agreement(pairs(groups, [float(np.exp(x)) for x in first], [x**3 + 7.0 for x in second]), "a", "b")
    assert plain == bent
    turned = rank_agreement(pairs(groups, [-x for x in first], second), "a", "b")
    for here, there in ((plain["overall"], turned["overall"]), (plain["within_groups"], turned["within_groups"])):
        assert (here is None) == (there is None)
        assert here is None or here == pytest.approx(-(there or 0.0), abs=1e-12)


def test_numpy_agrees_on_quantiles() -> None:
    values = np.random.default_rng(0).normal(size=777)
    found = quantiles_of(pl.Series([*values, None]))
    assert found is not None
    expected = np.quantile(values, [0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1])
    assert list(found.values()) == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("values", "ends", "bins"),
    [([0.31, 0.61, 1.0, None], (0.0, 1.0), [12, 24, BINS - 1]), ([7.0, 7.0], (6.5, 7.5), [20])],
)
def test_the_scale_of_a_histogram(values: list[float | None], ends: tuple[float, float], bins: list[int]) -> None:
    histogram = histogram_of(pl.Series(values))
    assert histogram is not None
    counts, edges = histogram
    assert (edges[0], edges[-1], len(edges)) == (*ends, BINS + 1)
    assert np.flatnonzero(counts).tolist() == bins


def test_nothing_has_no_quantiles() -> None:
    nothing = pl.Series([None, None], dtype=pl.Float64)
    assert quantiles_of(nothing) is None
    assert histogram_of(nothing) is None
