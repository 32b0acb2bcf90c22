import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs
from flows.terminal.inspection import show_run, thumbnail
from flows.terminal.output import show_report
from tasks.reports.run_page import progress
from tasks.storage.run_lock import locked
from tests.flows.conftest import refused
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(application, ["inspect", *arguments])
    return result.exit_code, result.stdout, result.stderr


def shown(root: Path, name: str = "made", width: int = 200, everything: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    found = inspect_run(name, root=str(root))
    show_report(found.report(None), console)
    show_run(found.run, found.samples.groups, found.samples.heldout, console, everything=everything, config=everything)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_prompt_of_an_image_takes_a_few_lines(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, prompts=("draw " * 2000, "a\u2028b\r\nc"))
    maker.iteration(1)
    text = shown(tmp_path)
    assert 0 < text.count("draw") < 100
    assert "a ⏎ b ⏎ c" in text


def test_json_is_the_last_line_alone_on_stdout(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    code, out, _ = invoke("made", "--root", str(tmp_path), "--json")
    assert code == 0
    printed = json.loads(out)
    expected = {
        "run": "made",
        "iterations": 2,
        "iterations_planned": 2,
        "iteration": 2,
        "reward_first": 0.5,
        "reward_last": 0.6,
        "heldout_before": 0.5,
        "heldout_after": 0.75,
        "policy_digest": f"{2:064d}",
        "folder": str(maker.folder),
        "finished": True,
        "warnings": [],
    }
    assert printed | expected == printed
    assert (printed["seconds"]["total"], printed["seconds"]["update"]) == (34.0, 6.0)


def test_a_name_under_the_root_and_a_path_are_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = whole_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    by_name = inspect_run("made", root=str(tmp_path)).summary(None)
    for path in (str(maker.folder), "made", "made/", "./made", "../" + tmp_path.name + "/made"):
        assert inspect_run(path, root="elsewhere").summary(None) == by_name
    monkeypatch.chdir(maker.folder)
    assert inspect_run(".", root="elsewhere").summary(None) == by_name


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mdae", {}, "RUN"),
    ("", {}, "RUN"),
    ("empty", {}, "RUN"),
    ("made/config.yaml", {}, "RUN"),
    ("nothing://here/run", {}, "RUN"),
    ("run", {"root": "nothing://here"}, "--root"),
    ("run", {"root": "no_such_folder"}, "RUN"),
    ("made", {"iteration": 7}, "--iteration"),
    ("made", {"iteration": 0}, "--iteration"),
    ("made", {"html": Path("nowhere/page.html")}, "--html"),
    ("made", {"html": Path("page.txt")}, "--html"),
    ("made", {"html": Path("folder.html")}, "--html"),
]


def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_run(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for name, options, place in WRONG:
        (error,) = refused(lambda name=name, options=options: inspect_run(name, **{"root": str(tmp_path), **options}))
        assert error.place == place, (name, options)
    assert contents(tmp_path) == before


def test_wrong_input_ends_the_command_with_2_and_the_nearest_name(tmp_path: Path) -> None:
    whole_run(tmp_path)
    code, out, err = invoke("mdae", "--root", str(tmp_path))
    assert (code, out, err.count("error:")) == (2, "", 1)
    assert "made" in err


def test_an_iteration_can_be_chosen(tmp_path: Path) -> None:
    whole_run(tmp_path)
    assert inspect_run("made", root=str(tmp_path), iteration=1).summary(None).iteration == 1


def test_inspecting_changes_nothing_even_when_files_are_damaged(tmp_path: Path) -> None:
    maker = whole_run(tmp_path / "runs")
    flip_last_byte(maker.folder / "iteration_000001/rollouts/part-00000.parquet")
    flip_last_byte(maker.folder / "iteration_000002/advantages/advantages.parquet")
    before = contents(maker.folder)
    page = tmp_path / "page.html"
    page.write_text("older")
    code, out, err = invoke("made", "--root", str(tmp_path / "runs"), "--html", str(page), "--json")
    assert code == 0
    assert contents(maker.folder) == before
    warnings = json.loads(out)["warnings"]
    for place in ("iteration_000001/rollouts/part-00000.parquet", "iteration_000002/advantages/advantages.parquet"):
        assert any(warning.startswith(place) for warning in warnings)
        assert place in page.read_text()
    assert err == ""
    # The second iteration's reward is not trusted, so the first is also the last.
    assert json.loads(out)["reward_first"] == json.loads(out)["reward_last"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "runs"}


def test_the_verdict_on_reward_hacking_is_shown_and_printed(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    maker.guardrail(0, "jpeg", 0.5)
    code, out, _ = invoke("made", "--root", str(tmp_path), "--json")
    assert code == 0
    hacking = json.loads(out)["hacking"]
    assert hacking["finding"] == "unknown"
    assert hacking["reasons"][0].startswith("2 of the 4 evaluations")
    assert hacking["summary"] in shown(tmp_path)
    for version, (shift, mean) in enumerate([(-0.2, 0.8)] * 3 + [(0.4, 0.4)] * 3):
        maker.evaluation(version, shift=shift)
        maker.guardrail(version, "jpeg", mean)
    assert "jpeg fell from 0.8 to 0.4" in shown(tmp_path)


def test_the_terminal_shows_curves_images_and_figures(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    maker.store.quarantine(["iteration_000001/rewards/ssim"], reason="scores.parquet has another sha256")
    text = shown(tmp_path)
    for said in (
        "finished: 2 iterations",
        "0.500 → 0.750 (+0.250)",
        "▁█",
        "i000002.p0000.s02",
        "reward 1.000, advantage +1.00",
        "log-prob -0.8 over 2 tokens",
        "KL to the reference",
        "scores.parquet has another sha256",
        "iterations: 2",
    ):
        assert said in text


def test_the_terminal_shows_every_stream(tmp_path: Path) -> None:
    whole_run(tmp_path, streams=("tokens", "denoising"))
    text = shown(tmp_path)
    for said in ("reward, denoising", "advantage, tokens +1.00", "log-prob, steps 2 to 3 1.2500, -0.5000"):
        assert said in text


def test_a_screen_has_the_curves_and_some_samples(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, prompts=tuple(f"prompt {number}" for number in range(20)), planned=1)
    maker.evaluation(0, shift=0.0)
    maker.iteration(1)
    maker.evaluation(1, shift=0.25)
    text = shown(tmp_path, everything=False)
    assert len(text.splitlines()) < 60
    assert "KL to the reference" in text
    assert text.count("3 of 20 prompts") == 2
    assert "iterations: 1" not in text
    assert "iterations: 1" in shown(tmp_path)


def test_the_terminal_shows_the_best_and_worst_texts(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", datasets=("sums", "poems"))
    maker.evaluation(0, shift=0.0)
    maker.written = {(0, 2): "first line\nlast line", (0, 1): "x" * 5000 + "\nfinis", (0, 0): ""}
    maker.iteration(1, rounds=2)
    maker.evaluation(2, shift=0.25)
    text = shown(tmp_path)
    for said in (
        "best and worst completion per prompt",
        "first line ⏎ last line",
        "finis",
        "log-prob -0.8 over 2 tokens",
        "finis (truncated)",
        "4 groups in 2 sampling rounds, 2 without spread left out of the update",
        "left out of the update",
        "poems: reward",
        "answer 0 of group 0",  # held-out, before
        "(empty)",  # and after
        "tokens so far",
    ):
        assert said in text
    assert "image" not in text.replace(str(tmp_path), "")
    assert text.count("x" * 20) < 100  # the page has the whole of it
    # The worst sample of both prompts; of held-out samples others are shown.
    assert text.count("(truncated)") == 2


def test_texts_and_prompts_cannot_command_the_terminal(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", prompts=("\x1b[2J[blue]b[/blue]\x07 \x9b31m cat", "[/]"))
    maker.written = {(0, 2): "\x1b[2J[red]a[/red]\x07 \x9b31m\r", (0, 1): "[/]"}
    maker.iteration(1)
    text = shown(tmp_path)
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)
    assert "[red]a[/red]" in text
    assert "[blue]b[/blue]" in text


def test_a_thumbnail_has_two_pixels_a_character() -> None:
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    image.paste((0, 0, 255), (0, 2, 4, 4))
    text = thumbnail(image, across=2)
    assert text.plain == "▀▀"
    style = text.spans[0].style
    assert str(style) == "#ff0000 on #0000ff"


def test_an_unfinished_run_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, planned=4)
    assert "0 of 4 iterations" in shown(tmp_path)
    maker.evaluation(0, shift=0.0)
    assert "0.500 → none yet" in shown(tmp_path)
    assert inspect_run("made", root=str(tmp_path)).summary(None).heldout_after is None
    maker.rollouts("iteration_000001", "i000001")
    assert "iteration 1 has rollouts" in shown(tmp_path)
    assert "reward none, advantage none" in shown(tmp_path)


def test_it_starts_without_the_training_libraries(tmp_path: Path) -> None:
    whole_run(tmp_path)
    program = (
        "import sys\n"
        f"sys.argv = ['grpo', 'inspect', 'made', '--root', {str(tmp_path)!r}]\n"
        "from flows.command_line.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'prefect', 'diffusers', 'transformers', 'matplotlib', 'pandas', 'jinja2'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_runs_with_their_state_and_last_figures(tmp_path: Path) -> None:
    whole_run(tmp_path)
    begun = RunMaker(tmp_path, "begun", planned=4)
    begun.iteration(1)
    (tmp_path / "notes").mkdir()
    with locked(begun.store, setting="run.name", value="begun"):
        made, other = list_runs(str(tmp_path))
        assert (other.run, other.state) == ("begun", "running")
    assert (made.run, made.state, made.iterations, made.planned) == ("made", "finished", 2, 2)
    assert (made.reward, made.heldout) == (0.6, 0.75)
    result = CliRunner().invoke(application, ["list", str(tmp_path), "--json"])
    (_, printed) = json.loads(result.stdout)["runs"]
    assert printed | {"run": "begun", "state": "stopped", "iterations": 1, "planned": 4, "heldout": None} == printed


EVALUATED = "evaluate:\n  prompts: heldout.jsonl\n"
GUARDED = f"{EVALUATED}guardrails:\n  rewards: [{{reward: sharpness}}]\n"


@pytest.mark.parametrize(
    ("settings", "killed_in", "state"),
    [
        ("", "the evaluation", "finished"),
        ("evaluate:\n  prompts: null\n  datasets: []\nguardrails: {rewards: null}\n", "the evaluation", "finished"),
        (EVALUATED, "", "finished"),
        (EVALUATED, "the evaluation", "stopped"),
        (EVALUATED, "its rewards", "stopped"),
        ("evaluate:\n  datasets: [{name: a}]\n", "its rewards", "stopped"),
        (GUARDED, "its guardrails", "stopped"),
        (GUARDED, "", "finished"),
        ("evaluate: [1]\nguardrails: 2\n", "the evaluation", "finished"),
        (f"{EVALUATED}guardrails: {{rewards: 3}}\n", "its guardrails", "finished"),
    ],
)
def test_a_run_killed_in_its_last_evaluation_is_not_finished(
    tmp_path: Path, settings: str, killed_in: str, state: str
) -> None:
    maker = RunMaker(tmp_path, settings=settings)
    maker.evaluation(0, shift=0.0)
    maker.iteration(1)
    maker.iteration(2)
    if killed_in == "its rewards":
        maker.rollouts("evaluations/000002", "e000002")
    elif killed_in != "the evaluation":
        maker.evaluation(2, shift=0.25)
    if not killed_in:
        maker.guardrail(2, "sharpness", 0.5)
    (listed,) = list_runs(str(tmp_path))
    assert (listed.state, listed.iterations) == (state, 2)
    found = inspect_run("made", root=str(tmp_path))
    assert found.run.finished == (state == "finished")
    assert ("the last policy is not evaluated" in progress(found.run)) == (state == "stopped")


@pytest.mark.parametrize("engine", ["continuous_batching", "one of a later version", "[]"])
def test_a_run_of_an_engine_that_is_not_known_is_listed_and_shown(tmp_path: Path, engine: str) -> None:
    RunMaker(tmp_path, modality="text", settings=f"rollout:\n  engine: {engine}\n").iteration(1)
    (listed,) = list_runs(str(tmp_path))
    assert (listed.iterations, listed.state) == (1, "stopped")
    assert "answer 2 of group 0" in shown(tmp_path)


def test_a_folder_that_is_missing_is_refused_and_an_empty_one_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path)) == []
    (error,) = refused(lambda: list_runs(str(tmp_path / "none")))
    assert error.place == "ROOT"
