"""A reward that rises while a guardrail falls: what is reported, when the run stops, and what a later start does."""

import contextlib
import contextvars
import json
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort
from prefect.flow_runs import resume_flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.preflight.inputs import check_inputs
from flows.training import callbacks
from tasks.runs.signs import HACKING
from tests.flows.conftest import TINY_TEXT, Runs, Start, refused

PLANNED = 3


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    return hacked_rewards(tmp_path)


def hacked_rewards(folder: Path) -> str:
    """A file of two functions: one rises from call to call, the other falls, as a hacked pair of rewards would."""
    source = f"""
    from pathlib import Path

    def level(name):
        noted = Path({str(folder)!r}, name)
        calls = len(noted.read_text()) if noted.exists() else 0
        noted.write_text("." * (calls + 1))
        return calls / 100

    def rising(prompts, completions, **columns):
        start = level("rising")
        return [start + len(text) / 1000 for text in completions]

    def falling(prompts, completions, **columns):
        return [0.8 - 20 * level("falling")] * len(completions)
    """
    folder.mkdir(exist_ok=True)
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def start(runs: Runs, rewards: str, *, iterations: int = PLANNED, **changes: Any) -> Start:
    guarded = {"patience": 1, "noise": 0.0, "rise": 0.01, "fall": 0.2, "on_fall": "stop"} | changes.pop(
        "guardrails", {}
    )
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
        "evaluate__limit": 1,
        "evaluate__samples_per_prompt": 1,
        "rewards": [{"reward": "function", "settings": {"function": f"{rewards}:rising"}, "batch_size": 999}],
        "guardrails": {"rewards": [guardrail], **guarded},
    }
    return runs.start_text(**settings, **changes)


def hacking(start: Start) -> list[tuple[int, str]]:
    """Version and message of each sign of reward hacking."""
    return [(sign.iteration, sign.message) for sign in start.summary.signs if sign.name == HACKING]


def test_a_hacked_run_stops_where_the_guardrail_fell_and_continues_without_stop(empty: Runs, rewards: str) -> None:
    stopped = start(empty, rewards, guardrails={"fall": 0.4})
    # The guardrail is .8 - .2 n at the n-th evaluation, the first being before training: .8, .6, .4.
    assert (stopped.summary.iterations, stopped.summary.stopped_early) == (2, True)
    ((since, sign),) = hacking(stopped)
    assert (since, "second fell from 0.8 to 0.4" in sign) == (2, True)
    note = json.loads(empty.path("guardrails.json", run="text").read_text())
    assert (note["version"], note["stopped"]) == (2, True)
    assert [sign.startswith(text) for text in note["signs"]] == [True]
    page = empty.root / "page.html"
    arguments = ["inspect", "text", "--root", str(empty.root), "--html", str(page)]
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 0, result.output
    assert "second fell from" in page.read_text()

    again = start(empty, rewards, guardrails={"fall": 0.4})
    assert again.stages == ()
    assert (again.summary.policy_digest, hacking(again)) == (stopped.summary.policy_digest, [(since, sign)])

    on = start(empty, rewards, guardrails={"fall": 0.4, "on_fall": "report"})
    assert (on.summary.iterations, on.summary.stopped_early, len(hacking(on))) == (PLANNED, False, 1)
    assert {stage.partition(":")[0] for stage in on.stages} == {"iteration 3", "evaluation of policy 3"}


@contextlib.contextmanager
def person() -> Iterator[list[str]]:
    """Someone who resumes the newest run whenever it is paused; the names of the states that they saw."""
    gone, seen, context = threading.Event(), [], contextvars.copy_context()

    def watch() -> None:
        with get_client(sync_client=True) as client:
            while not gone.wait(0.2):
                for each in client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1):
                    if each.state is not None and each.state.is_paused():
                        seen.append(each.state.name)
                        resume_flow_run(each.id)

    thread = threading.Thread(target=context.run, args=(watch,))
    thread.start()
    try:
        yield seen
    finally:
        gone.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.usefixtures("stored_events")
def test_a_paused_run_that_is_resumed_ends_as_one_that_never_paused(
    empty: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_SECONDS_BETWEEN_POLLS", 0.2)
    watched, own = {"on_fall": "pause", "pause_timeout": 60}, hacked_rewards(tmp_path / "paused")
    with pytest.raises(callbacks.NotResumedError):
        start(empty, own, run="watched", iterations=2, guardrails={**watched, "pause_timeout": 1})
    with person() as seen:
        resumed = start(empty, own, run="watched", iterations=2, guardrails=watched)
    assert (seen, resumed.summary.iterations, resumed.summary.stopped_early) == (["Paused"], 2, False)
    # Without a person: what was accepted is not asked again.
    assert start(empty, own, run="watched", iterations=2, guardrails={**watched, "pause_timeout": 1}).stages == ()

    straight = hacked_rewards(tmp_path / "straight")
    other = start(Runs(tmp_path / "other"), straight, iterations=2, guardrails={**watched, "on_fall": "report"})
    assert resumed.summary.policy_digest == other.summary.policy_digest
    # Each once, though the run was started three times, and the sign once, though it stays.
    assert events("watched") == [*(("grpo.evaluated", version) for version in (0, 1, 2)), ("grpo.hacking-sign", 1)]


def events(run: str) -> list[tuple[str, int]]:
    """Name and policy version of a run's events, sorted; the server writes them with some delay."""
    wanted = {"filter": {"resource": {"id": [f"grpo.run.{run}"]}}, "limit": 50}
    with get_client(sync_client=True) as client:
        for _ in range(60):
            found = client._client.post("/events/filter", json=wanted).json()["events"]
            if len(found) > 3:
                break
            time.sleep(0.5)
    return sorted((each["event"], each["payload"]["policy"]) for each in found)


def test_a_pause_needs_a_ui(empty: Runs) -> None:
    watched = {"rewards": [{"reward": "answer"}], "on_fall": "pause"}
    config = read_config(TINY_TEXT, empty.overrides({}, guardrails=watched, evaluate__every=1))
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        (error,) = refused(lambda: check_inputs(config))
    assert (error.place, error.value) == ("guardrails.on_fall", "pause")


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"evaluate__every": 0}, "guardrails.on_fall"),
        ({"guardrails__rewards": [{"reward": "ssim"}]}, "guardrails.rewards.0.reward"),
    ],
)
def test_an_impossible_watch_is_refused(empty: Runs, changes: dict[str, Any], place: str) -> None:
    plain = {"guardrails__rewards": [{"reward": "answer"}], "guardrails__on_fall": "stop", "evaluate__every": 1}
    errors = refused(lambda: empty.start_text(**{**plain, **changes}))
    assert any(error.place.startswith(place) for error in errors), errors
