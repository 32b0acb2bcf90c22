from pathlib import Path

import pytest

from flows.list_runs import list_runs, write_list_page
from grpo_core.errors import InputError
from tasks.reports.list_page import RunCurves, configurations, over_seeds
from tasks.reports.text import visible
from tests.tasks.reports.made_runs import RunMaker, whole_run
from tests.tasks.reports.test_comparison import scored_by
from tests.tasks.reports.test_run_page import EVIL, check_offline


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


def test_a_band_is_the_range_over_the_runs_that_got_there() -> None:
    mean, band = over_seeds([[(1, 0.2), (2, 0.4)], [(1, 0.4), (2, 0.8)], [(1, 0.9)]])
    assert mean == [(1, pytest.approx(0.5)), (2, pytest.approx(0.6))]
    assert band == [(1, 0.2, 0.9), (2, 0.4, 0.8)]


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


def test_a_page_of_no_runs_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_list_page(str(tmp_path), [], page)
    assert not check_offline(page.read_text()).named("svg")
    with pytest.raises(InputError) as error:
        write_list_page(str(tmp_path), [], tmp_path / "none" / "page.html")
    assert error.value.place == "--html"
