import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.compare_runs import compare
from tasks.reports.report import reward_facts
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import summary_of
from tests.flows.conftest import refused
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run
from tests.tasks.reports.test_comparison import made


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application, ["compare", *arguments])
    return result.exit_code, result.stdout, result.stderr


WRONG: list[tuple[list[str], dict[str, Any], list[tuple[str, str]]]] = [
    (["a"], {}, [("RUN", "a")]),
    (["a", "z", "y"], {}, [("RUN", "z"), ("RUN", "y")]),
    (["a", "b", "a"], {}, [("RUN", "a")]),
    (["a@1", "b", "a@1"], {}, [("RUN", "a@1")]),
    (["b", "a@7"], {}, [("RUN", "a@7")]),
    (["a", "b"], {"html": Path("page.txt")}, [("--html", "page.txt")]),
    (["a", "b"], {"evaluation": "x"}, [("--evaluation", "x")]),
]


def test_wrong_input(tmp_path: Path) -> None:
    for name in ("a", "b"):
        RunMaker(tmp_path, name)
    before = contents(tmp_path)
    for names, options, expected in WRONG:
        errors = refused(lambda names=names, options=options: compare(names, root=str(tmp_path), **options))
        assert [(error.place, error.value) for error in errors] == expected
    assert contents(tmp_path) == before


def test_the_summary_is_one_line_and_the_page_is_written(tmp_path: Path) -> None:
    first, second = made(tmp_path, "a", 0.0), made(tmp_path, "b", 0.25, weight=2.0)
    flip_last_byte(second.folder / "iteration_000001/rollouts/part-00000.parquet")
    before, page = contents(first.folder), tmp_path / "page.html"
    code, out, err = invoke("a", "b", "--root", str(tmp_path), "--html", str(page), "--json")
    assert code == 0
    printed = json.loads(out)
    assert [(run["label"], run["policy"], run["heldout_after"]) for run in printed["runs"]] == [
        ("a", 1, 0.5),
        ("b", 1, 0.75),
    ]
    (difference,) = printed["differences"]
    expected = {"run": "b", "score": "ssim", "prompts": 2, "samples": 6, "same_seeds": True, "higher": 2, "lower": 0}
    assert difference | expected == difference
    assert (difference["low"], difference["high"]) == pytest.approx((0.25, 0.25))
    assert printed["omissions"] == ["b: its combined reward is another mix than that of a, so it is not compared"]
    assert [warning.split(":")[0] for warning in printed["warnings"]] == ["b"]
    assert "+0.250 to +0.250" in err
    assert "by_prompt" not in difference
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert contents(first.folder) == before


def test_the_terminal_shows_curves_settings_and_samples(tmp_path: Path) -> None:
    made(tmp_path, "a", 0.0, modality="text")
    made(tmp_path, "b", 0.25, modality="text", settings="update: {learning_rate: 0.5}\n", prompts=("[b]", "\x1b[2J"))
    code, out, err = invoke("a", "b", "--root", str(tmp_path))
    assert code == 0
    for said in ("Held-out reward", "learning_rate", "answer 0 of group 1", "0.750"):
        assert said in out + err
    assert "\x1b[2J" not in out + err


def test_runs_of_one_name_go_by_their_paths(tmp_path: Path) -> None:
    first = made(tmp_path / "x", "run", 0.0)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    names = [str(first.folder), str(tmp_path / "y" / "run")]
    found = compare(names, root=str(tmp_path))
    assert [run.label for run in found.runs] == names


def test_versions_of_one_run_are_compared(tmp_path: Path) -> None:
    made(tmp_path, "a", 0.25)
    (difference,) = compare(["a@0", "a"], root=str(tmp_path)).differences
    assert (difference.run, difference.difference) == ("a", pytest.approx(0.25))
    (back,) = compare(["a@1", "a@0"], root=str(tmp_path)).differences
    assert (back.run, back.difference) == ("a@0", pytest.approx(-0.25))


def test_versions_that_nobody_named_and_that_differ_are_said_first_with_a_command_for_equal_ones(
    tmp_path: Path,
) -> None:
    """The first run was evaluated at 0, 1 and 2, the second at 0 and 1."""
    further = made(tmp_path, "a", 0.25)
    further.evaluation(2, shift=0.5)
    made(tmp_path, "b", 0.25)
    _, out, err = invoke("a", "b", "--root", str(tmp_path), "--json")
    said, command = json.loads(out)["warnings"]
    assert "2 of a, 1 of b" in said
    names = command.rpartition("grpo compare ")[2].split()
    assert names == ["a@1", "b@1"]
    assert err.index(said) < err.index("a (policy 2)") < err.index("b (policy 1)")
    for named in (names, ["a@2", "b"], ["a", "b@1"]):
        assert compare(named, root=str(tmp_path)).unequal_versions == []


def test_curves_of_a_row_share_one_scale(tmp_path: Path) -> None:
    """Held-out rewards of 0.5 and 0.75, and of 0.5 and 0.5."""
    made(tmp_path, "a", 0.25)
    made(tmp_path, "b", 0.0)
    _, out, _ = invoke("a", "b", "--root", str(tmp_path))
    (row,) = (line.split() for line in out.splitlines() if "Held-out reward" in line)
    assert row == ["Held-out", "reward", "▁█", "0.75", "▁▁", "0.5"]


def test_a_replay_says_whose_rewards_it_was_trained_on(tmp_path: Path) -> None:
    own, replayed = made(tmp_path, "own", 0.0), whole_run(tmp_path, "replayed", settings=REPLAYED)
    for maker, expected in ((own, ("reward", "held-out reward")), (replayed, REPLAYED_TITLES)):
        view = read_run(RunReader(maker.store))
        assert tuple(title.split(",")[0] for title, _ in reward_facts(summary_of(view))[:2]) == expected
        runner = CliRunner().invoke(application, ["inspect", maker.store.run, "--root", str(tmp_path)])
        for title in expected:
            # Among the facts, and beside its curve.
            assert runner.stdout.count(title) >= 2
    page = tmp_path / "page.html"
    CliRunner().invoke(application, ["inspect", "replayed", "--root", str(tmp_path), "--html", str(page)])
    assert all(title in page.read_text() for title in REPLAYED_TITLES)


REPLAYED = "replay: {source: own, policy: 0, iterations: [1, 2], advantages: kinder}\n"
REPLAYED_TITLES = ("reward (rescoring kinder)", "held-out reward (original rewards)")
