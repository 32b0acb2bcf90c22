import io
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.preflight.doctor import Diagnosis, Finding
from flows.terminal import progress as terminal
from flows.terminal.doctor import show_diagnosis
from flows.terminal.progress import training_progress
from flows.terminal.training import show_summary
from flows.training.summary import TrainSummary
from grpo_core.policies.estimate import MemoryEstimate, MemoryPart
from tasks.progress import log, progress_of


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the module's console shows, as a log of 160 columns."""
    console = Console(file=io.StringIO(), width=160)
    monkeypatch.setattr(terminal, "console", console)
    assert isinstance(console.file, io.StringIO)
    return console.file


def summary(**changes: Any) -> TrainSummary:
    known: dict[str, Any] = {
        "run": "r",
        "iterations": 3,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "heldout_before": None,
        "heldout_after": None,
        "policy_digest": "0123456789abcdef0123",
        "seconds": {"total": 12.34, "rollouts": 5.0},
        "folder": "/elsewhere/r",
        "contact_sheet": None,
        "heldout_texts": None,
        "watch": None,
        "hacking": [],
        "stopped_early": False,
        "quarantined": [],
        "previous": [],
    }
    return TrainSummary(**known | changes)


def test_a_summary_tells_rewards_times_and_where_to_look(screen: io.StringIO) -> None:
    show_summary(summary(heldout_before=0.5, heldout_after=0.375))
    text = screen.getvalue()
    for said in (
        "r: 3 iterations",
        "0.250 -> 0.750 (+0.500)",
        "0.500 -> 0.375 (-0.125)",
        "12.3",
        "0123456789abcdef",
        "/elsewhere/r",
    ):
        assert said in text
    assert "0123456789abcdef0" not in text
    assert "before and after" not in text


@pytest.mark.parametrize(
    ("field", "label"),
    [
        ("contact_sheet", "images before and after"),
        ("heldout_texts", "completions before and after"),
        ("watch", "reward beside its guardrails"),
    ],
)
def test_what_was_kept_of_the_heldout_prompts_is_named(screen: io.StringIO, field: str, label: str) -> None:
    show_summary(summary())
    assert label not in screen.getvalue()
    show_summary(summary(**{field: "/elsewhere/r/kept"}))
    (line,) = [line for line in screen.getvalue().splitlines() if label in line]
    assert "/elsewhere/r/kept" in line


@pytest.mark.parametrize(("stopped", "label"), [(False, "watch"), (True, "stopped by the watch")])
def test_what_the_watch_saw_is_told(screen: io.StringIO, stopped: bool, label: str) -> None:
    show_summary(summary(hacking=["jpeg [b] fell"], stopped_early=stopped))
    (line,) = [line for line in screen.getvalue().splitlines() if "jpeg [b] fell" in line]
    assert line.split("jpeg")[0].strip(" │") == label


def test_a_place_below_is_shortened(screen: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    show_summary(summary(folder=str(tmp_path / "runs" / "r")))
    assert "runs/r" in screen.getvalue()
    assert str(tmp_path) not in screen.getvalue()


def test_reasons_are_no_markup(screen: io.StringIO) -> None:
    show_summary(summary(reward_first=None, previous=["[red]changed[/red] [/]"], policy_digest=None))
    assert "[red]changed[/red] [/]" in screen.getvalue()
    assert screen.getvalue().count("none") == 3  # both rewards and the digest


def test_a_stage_has_one_line_in_a_log_when_it_ends(screen: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        with training_progress():
            report_progress = progress_of("iteration 1: collect rollouts", 4)
            report_progress(2, 4)
            assert capsys.readouterr().err == ""
            report_progress(4, 4)
            log("iteration 1/2: reward [0.5]")

    copy_context().run(body)
    stage, line = capsys.readouterr().err.splitlines()
    assert stage.startswith("iteration 1: collect rollouts: 4/4 in ")
    assert line == "iteration 1/2: reward [0.5]"


def test_a_terminal_has_the_bar_of_the_stage_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    monkeypatch.setattr(terminal, "console", console)

    def body() -> None:
        with training_progress():
            progress_of("first stage", 4)(4, 4)
            progress_of("second stage", 8)(2, 8)
            log("told [0.5]")

    copy_context().run(body)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "told [0.5]" in text
    last = text.rsplit("told", 1)[1]
    assert "second stage" in last
    assert "2/8" in last
    assert "first stage" not in last


def test_a_finding_shows_its_mend_as_it_is_written(screen: io.StringIO) -> None:
    findings = (
        Finding(subject="fonts", healthy=True, said="[ready]", hint=""),
        Finding(subject="storage", healthy=False, said="full", hint="Free [some] of it."),
    )
    show_diagnosis(Diagnosis(findings=findings, memory=None))
    first, second, third = screen.getvalue().splitlines()
    assert first == "ok   fonts: [ready]"
    assert second == "hint storage: full"
    assert third.strip() == "Free [some] of it."


def test_memory_is_shown_part_by_part(screen: io.StringIO) -> None:
    parts = (MemoryPart("weights", "always", 2 * 1024**3, "2 x 1"), MemoryPart("cache", "sampling", 1024**2, "a few"))
    show_diagnosis(Diagnosis(findings=(), memory=MemoryEstimate(parts)))
    lines = screen.getvalue().splitlines()
    assert any("weights" in line and "2.00" in line and "2 x 1 (always)" in line for line in lines)
    assert any("cache" in line and "0.00098" in line for line in lines)
