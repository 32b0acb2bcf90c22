"""Each summary contains its key numbers; names and reasons are data, not markup."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from flows.evaluation.evaluate import EvaluateSummary, RewardMetrics
from flows.preflight.doctor import Diagnosis, Finding
from flows.terminal.summaries import show_diagnosis, show_evaluation, show_training
from flows.training.summary import TrainSummary
from grpo_core.policies.estimate import MemoryEstimate, MemoryPart

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"
SHOWN = "[red]x[/red] \N{REPLACEMENT CHARACTER}[2J [/nothing]"


def shown(show: Callable[[Any, Console], None], what: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(what, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summary(**changes: Any) -> TrainSummary:
    known: dict[str, Any] = {
        "run": "r",
        "iterations": 3,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "heldout_before": None,
        "heldout_after": None,
        "heldout_baselines": {},
        "policy_digest": "0123456789abcdef0123",
        "seconds": {"total": 12.34, "rollouts": 5.0},
        "folder": "/elsewhere/r",
        "contact_sheet": None,
        "heldout_texts": None,
        "watch": None,
        "hacking": [],
        "stopped_early": False,
        "quarantined": [],
        "reused": {},
    }
    return TrainSummary(**known | changes)


def test_a_training_shows_rewards_times_and_where_to_look() -> None:
    text = shown(show_training, summary(heldout_before=0.5, heldout_after=0.375))
    for expected in ("+0.500", "-0.125", "12.3", "0123456789abcdef", "/elsewhere/r"):
        assert expected in text


@pytest.mark.parametrize("field", ["contact_sheet", "heldout_texts", "watch"])
def test_a_training_names_each_file_that_it_wrote(field: str) -> None:
    assert "/elsewhere/r/file" in shown(show_training, summary(**{field: "/elsewhere/r/file"}))


@pytest.mark.parametrize("field", ["hacking", "quarantined"])
def test_a_training_shows_each_reason_as_data(field: str) -> None:
    assert SHOWN in shown(show_training, summary(**{field: [HOSTILE]}))


def test_a_folder_below_the_working_directory_is_shortened(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(show_training, summary(folder=str(tmp_path / "runs" / "r")))
    assert "runs/r" in text
    assert str(tmp_path) not in text


def test_an_evaluation_shows_rewards_and_guardrails() -> None:
    evaluated = EvaluateSummary(
        run="r",
        policy=2,
        policy_digest="0" * 64,
        prompts=None,
        heldout=0.125,
        rewards={"ssim": RewardMetrics(mean=0.25, std=0.5, without=1, failed=3)},
        guardrails={HOSTILE: RewardMetrics(mean=None, std=None, without=0, failed=0)},
        samples=6,
        stored=True,
        seconds={"total": 1.0},
        folder="/elsewhere/r",
    )
    text = shown(show_evaluation, evaluated)
    for expected in ("0.125", "0.25", SHOWN, "6 samples", "/elsewhere/r"):
        assert expected in text


def test_a_diagnosis_shows_findings_hints_and_memory() -> None:
    findings = (
        Finding(subject="fonts", healthy=True, message="[ready]"),
        Finding(subject="disk", healthy=False, message="full", hint="Free [some] of it."),
    )
    parts = (MemoryPart("weights", "always", 2 * 1024**3, "2 x 1"), MemoryPart("cache", "sampling", 1024**2, "a few"))
    text = shown(show_diagnosis, Diagnosis(findings=findings, memory=MemoryEstimate(parts)))
    for expected in ("fonts: [ready]", "disk: full", "Free [some] of it.", "2.00", "0.00098", "2 x 1 (always)"):
        assert expected in text
