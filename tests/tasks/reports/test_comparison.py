import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.list_runs import list_runs, write_list_page
from grpo_core.errors import InputError
from tasks.reports.compare_page import render_compare_page, run_rows
from tasks.reports.compared_runs import PairedDifference, Scores, interval, paired_difference
from tasks.reports.comparison import Comparison, compare_runs
from tasks.reports.list_page import RunCurves, configurations, over_seeds
from tasks.reports.text import visible
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Cost
from tests.tasks.reports.made_runs import RunMaker, colour, whole_run
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


def test_what_each_run_took_to_the_reward_that_all_have_reached(tmp_path: Path) -> None:
    slow = RunMaker(tmp_path, "a", identity=identity(1.0), settings="placement: {devices: [0, 1]}\n")
    for version, shift in enumerate((0.0, 0.125, 0.375, 0.125)):
        if version:
            slow.iteration(version)
        slow.evaluation(version, shift=shift, seed=0)
    quick, other = made(tmp_path, "b", 0.25), made(tmp_path, "c", 0.25, weight=2.0)
    found = compared(slow, quick)
    # Eight samples an iteration, whose stages take 4 + 2 + 1 + 3 seconds; two devices.
    assert found.common_reward == 0.75
    assert [run.view.cost_until(0.75) for run in found.runs] == [
        Cost(samples=16, seconds=20.0),
        Cost(samples=8, seconds=10.0),
    ]
    assert [run.view.throughput for run in found.runs] == [pytest.approx(0.4), pytest.approx(0.8)]
    assert [row["until held-out 0.750"] for row in run_rows(found)] == ["20 s, 16 samples", "10 s, 8 samples"]
    assert found.runs[1].view.cost_until(0.76) is None
    assert compared(slow, quick, other).common_reward is None


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
    second.draw(place, 1, "heldout", ["heldout"], shift=0.25)
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
    maker.draw(place, 1, "heldout", ["heldout"], shift=0.25)
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
    assert found.by_prompt == {"a": pytest.approx(0.3), "b": pytest.approx(-0.1)}
    assert (found.first, found.second, found.difference) == pytest.approx((0.4, 0.5, 0.1))
    # 12.7062 is Student's t of one degree of freedom, and 0.2828 / sqrt(2) = 0.2 the standard error.
    assert (found.low, found.high) == pytest.approx((0.1 - 2.54124, 0.1 + 2.54124), abs=1e-5)
    assert (found.prompts, found.samples, found.higher, found.lower) == (2, 3, 1, 1)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert interval([0.5, 0.5]) == (0.5, 0.5)
    assert interval([0.5]) is None
    found = paired({"a": {1: 1.0, 2: 3.0}}, {"a": {7: 5.0}})
    assert (found.difference, found.samples, found.low, found.high) == (3.0, 3, None, None)
    assert paired({"a": {1: 1.0}}, {"b": {1: 1.0}}) is None
    assert paired({"a": {1: 1.0}}, {"a": {}}) is None


def run(name: str, seed: int, rate: float = 0.1, reward: tuple[float, ...] = ()) -> RunCurves:
    config = {"run": {"name": name, "seed": seed}, "update": {"learning_rate": rate}, "storage": {"root": name}}
    return RunCurves(name, config, {}, list(enumerate(reward, start=1)), [])


def test_runs_that_differ_in_their_seed_alone_are_one_configuration() -> None:
    runs = [run("a", 0), run("b", 0, 0.2), run("c", 7), RunCurves("d", {}, {}, [], []), RunCurves("e", {}, {}, [], [])]
    found = configurations(runs)
    assert [[each.name for each in group.runs] for group in found] == [["a", "c"], ["b"], ["d"], ["e"]]
    assert (found[0].seeds, found[1].label) == ("0, 7", "b")
    # config.yaml may be damaged.
    (broken,) = configurations([RunCurves(name, {"run": 5}, {}, [], []) for name in "fg"])
    assert broken.seeds == "?, ?"
    mean, band = over_seeds([[(1, 0.2), (2, 0.4)], [(1, 0.4), (2, 0.8)], [(1, 0.9)]])
    assert mean == [(1, pytest.approx(0.5)), (2, pytest.approx(0.6))]
    assert band == [(1, 0.2, 0.9), (2, 0.4, 0.8)]


def test_only_runs_of_the_same_rewards_share_a_plot(tmp_path: Path) -> None:
    """Of `other` a reward's function was changed in its file; the replay was trained on a rescoring of `own`."""
    rewards = "rewards: [{reward: function, settings: {function: 'a.py:brevity'}}]\n"
    for name, version, replay in (
        ("own", "1+aa", ""),
        ("other", "1+bb", ""),
        ("replayed", "1+aa", "replay: {source: own, advantages: mine}\n"),
    ):
        made_of = scored_by("a.py:brevity", version)
        maker = RunMaker(tmp_path, name, planned=1, identity=made_of, settings=rewards + replay)
        maker.evaluation(0, shift=0.0)
        maker.iteration(1)
    page = tmp_path / "page.html"
    write_list_page(str(tmp_path), list_runs(str(tmp_path)), page)
    found = check_offline(page.read_text())
    assert sorted(str(svg["aria-label"]) for svg in found.named("svg")) == [
        *["Held-out reward: brevity over iterations"] * 2,
        *["Training reward: brevity over iterations"] * 2,
        "Training reward: rescoring mine of own over iterations",
    ]
    assert "3 runs, 3 configurations" in "".join(found.text)


def test_the_page_of_runs_opens_offline(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    evil = EVIL.replace("/", "|").replace("{{ 'ran' * 3 }}", "")
    for name in ("a", "b"):
        whole_run(runs, name)
    RunMaker(runs, "empty", planned=9)
    other = whole_run(runs, "other", settings="data: {prompts: '" + evil.replace("'", "''") + "'}\n")
    page = tmp_path / "page.html"
    write_list_page(str(runs), list_runs(str(runs)), page)
    found = check_offline(page.read_text())
    text = "".join(found.text)
    assert visible(evil) in text
    assert "4 runs, 3 configurations" in text
    assert {svg["aria-label"] for svg in found.named("svg")} == {
        "Training reward over iterations",
        "Held-out reward over iterations",
    }
    # Two runs of one configuration have a band; their reward rose from 0.5 to 0.6.
    assert [path["class"] for path in found.named("path") if "band" in (path["class"] or "")] == ["band s0"] * 2
    assert "a and 1 more, iteration 2: 0.6" in text
    # One whose metrics cannot be read is listed without them.
    (other.folder / "iteration_000002/advantages.manifest.json").write_text("{}")
    write_list_page(str(runs), list_runs(str(runs)), page)
    assert "other, iteration 1: 0.5" in page.read_text()
    assert "other, iteration 2: 0.6" not in page.read_text()
    write_list_page(str(tmp_path), [], page)
    assert not check_offline(page.read_text()).named("svg")
    with pytest.raises(InputError) as error:
        write_list_page(str(tmp_path), [], tmp_path / "none" / "page.html")
    assert error.value.place == "--html"
