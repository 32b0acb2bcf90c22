from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.reports.compare_page import render_compare_page
from tasks.reports.comparison import Comparison, compare_runs
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import RunMaker, colour
from tests.tasks.reports.test_run_page import EVIL, check_offline, images

REPLAY = "replay: {source: a, advantages: mine}\n"


def identity(weight: float = 1.0, plan: str = "plan") -> dict[str, Any]:
    """What run.json says of a run's rewards and of its held-out prompts."""
    settings = {"rewards": {"ssim": {"weight": weight}}, "advantages": {"missing": "group_mean", "clip": weight}}
    return {"identity": {"settings": settings, "scores": [["{}", "[]"]], "code": {}}, "evaluation": plan}


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


@pytest.mark.parametrize(
    ("change", "scores", "said"),
    [
        (lambda root: made(root, "b", 0.25, seed=1000), ["reward"], "some held-out samples have other seeds"),
        (lambda root: made(root, "b", 0.25, weight=2.0), ["ssim"], "its combined reward is another mix than that of a"),
        (lambda root: made(root, "b", 0.25, identity=identity(plan="x")), ["reward"], "so no held-out curves"),
        (lambda root: made(root, "b", 0.25, identity={}), ["ssim"], "cannot be told to be the same mix"),
        (lambda root: made(root, "b", 0.25, prompts=("x", "y", "z")), ["reward"], "left out are 0 prompts of a and 1"),
        (lambda root: made(root, "b", 0.25, modality="text"), [], "b samples completions and a images"),
        (lambda root: RunMaker(root, "b", identity=identity()), [], "b has no stored evaluation"),
        (lambda root: made(root, "b", 0.25, settings=REPLAY), ["reward"], "b: trained on mine, a on its own"),
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


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_page_shows_every_run_offline(tmp_path: Path, modality: Any) -> None:
    makers = [
        made(tmp_path, name, shift, modality=modality, prompts=(EVIL, "plain"))
        for name, shift in (("a", 0.0), ("b", 0.125))
    ]
    page = check_offline(render_compare_page(replace(compared(*makers), warnings=[EVIL])))
    text = "".join(page.text)
    assert "+0.125 to +0.125" in text
    assert text.count(EVIL) == 2
    assert "ranranran" not in text
    if modality == "image":
        shown = [image.convert("RGB").getpixel((0, 0)) for image in images(page)]
        assert sorted(shown) == sorted(2 * [colour(group, sibling) for group in (0, 1) for sibling in range(4)])
    else:
        assert text.count("answer 2 of group 1") == 2
