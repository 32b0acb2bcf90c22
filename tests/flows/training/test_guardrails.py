"""A reward that rises while a guardrail falls: what is reported, when the run stops, and what a later start does."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from tests.flows.conftest import Runs, Start, refused

PLANNED = 6


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    """A file of two functions: one rises from call to call, the other falls, as a hacked pair of rewards would."""
    source = f"""
    from pathlib import Path

    def level(name):
        noted = Path({str(tmp_path)!r}, name)
        calls = len(noted.read_text()) if noted.exists() else 0
        noted.write_text("." * (calls + 1))
        return calls / 100

    def rising(prompts, completions, **columns):
        start = level("rising")
        return [start + len(text) / 1000 for text in completions]

    def falling(prompts, completions, **columns):
        return [0.8 - 20 * level("falling")] * len(completions)
    """
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def start(runs: Runs, rewards: str, *, iterations: int = PLANNED, **changes: Any) -> Start:
    watch = {"patience": 1, "noise": 0.0, "rise": 0.01, "fall": 0.2, "stop": True} | changes.pop("watch", {})
    falling = {"function": f"{rewards}:falling"}
    guardrail = {"reward": "function", "name": "second", "settings": falling, "batch_size": 999}
    settings: dict[str, Any] = {
        "run__iterations": iterations,
        "rollout__prompts_per_iteration": 2,
        "rollout__group_size": 2,
        "rollout__prompts_per_batch": 2,
        "update__minibatch_size": 4,
        "update__micro_batch_size": 4,
        "evaluate__every": 1,
        "evaluate__limit": 2,
        "evaluate__samples_per_prompt": 2,
        "rewards": [{"reward": "function", "settings": {"function": f"{rewards}:rising"}, "batch_size": 999}],
        "watch": {"guardrails": [guardrail], **watch},
    }
    return runs.start_text(**settings, **changes)


def test_a_hacked_run_stops_where_the_guardrail_fell_and_continues_without_stop(empty: Runs, rewards: str) -> None:
    stopped = start(empty, rewards, watch={"fall": 0.6})
    # The guardrail is .8 - .2 n at the n-th evaluation, the first being before training: .8, .6, .4, .2.
    assert (stopped.summary.iterations, stopped.summary.stopped_early) == (3, True)
    (sign,) = stopped.summary.hacking
    assert "second fell from 0.8 to 0.2" in sign
    assert stopped.summary.watch is not None
    assert Path(stopped.summary.watch).read_bytes().startswith(b"\x89PNG")
    note = json.loads(empty.path("watch.json", run="text").read_text())
    assert (note["version"], note["signs"], note["stopped"]) == (3, [sign], True)
    page = empty.root / "page.html"
    arguments = ["inspect", "text", "--root", str(empty.root), "--html", str(page)]
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 0, result.output
    assert "second fell from" in page.read_text()

    again = start(empty, rewards, watch={"fall": 0.6})
    assert again.stages == ()
    assert (again.summary.policy_digest, again.summary.hacking) == (stopped.summary.policy_digest, [sign])

    on = start(empty, rewards, watch={"fall": 0.6, "stop": False})
    assert (on.summary.iterations, on.summary.stopped_early, len(on.summary.hacking)) == (PLANNED, False, 1)
    assert not [stage for stage in on.stages if stage.startswith(("iteration 1:", "iteration 3:"))]


def test_a_guardrail_that_holds_says_nothing(empty: Runs, rewards: str) -> None:
    quiet = start(empty, rewards, iterations=2, watch={"fall": 0.9})
    assert (quiet.summary.hacking, quiet.summary.stopped_early, quiet.summary.iterations) == ([], False, 2)
    assert json.loads(empty.path("watch.json", run="text").read_text())["signs"] == []


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"watch__guardrails": [], "watch__stop": True}, "watch.stop"),
        ({"evaluate__every": 0}, "watch.stop"),
        ({"evaluate__prompts": None}, "watch.guardrails"),
        ({"watch__guardrails": [{"reward": "answer", "weight": 2.0}]}, "watch.guardrails.0.weight"),
        ({"watch__guardrails": [{"reward": "ssim"}]}, "watch.guardrails.0.reward"),
        ({"watch__guardrails": [{"reward": "answer"}] * 2}, "watch.guardrails"),
        ({"watch__fall": 1.5}, "watch.fall"),
    ],
)
def test_an_impossible_watch_is_refused(empty: Runs, changes: dict[str, Any], place: str) -> None:
    plain = {"watch__guardrails": [{"reward": "answer"}], "watch__stop": True, "evaluate__every": 1}
    errors = refused(lambda: empty.start_text(**{**plain, **changes}))
    assert any(error.place.startswith(place) for error in errors), errors
