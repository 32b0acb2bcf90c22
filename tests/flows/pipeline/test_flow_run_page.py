"""What Prefect's server knows of a flow run that is at work: the lines of its log, and the bars of its stages."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from flows.pipeline import flow_run_page
from flows.pipeline.flow_run_page import artifact_key, shown_in_ui
from tasks.progress import log, progress_of
from tests.flows.conftest import heard_of


def read(path: str, **wanted: Any) -> list[dict[str, Any]]:
    with get_client(sync_client=True) as client:
        found: list[dict[str, Any]] = client._client.post(path, json=wanted).json()
        return found


def bars(flow_run: str) -> list[tuple[str, str, float]]:
    found = read("/artifacts/filter", artifacts={"flow_run_id": {"any_": [flow_run]}})
    return [(each["key"], each["description"], each["data"]) for each in found]


def waited(get: Callable[[], list[Any]]) -> list[Any]:
    limit = time.monotonic() + 30
    while not get() and time.monotonic() < limit:
        time.sleep(0.1)
    return get()


@pytest.mark.usefixtures("server")
def test_lines_and_bars_are_on_the_page_while_a_stage_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_run_page, "SECONDS_BETWEEN_UPDATES", 0.0)
    seen: list[Any] = []

    @task
    def stage(flow_run: str) -> None:
        report = progress_of("iteration 1: collect rollouts", 8)
        report(2)
        seen.extend(waited(lambda: bars(flow_run)))
        report(8)

    @flow
    def training() -> str:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        flow_run = str(context.flow_run.id)
        with shown_in_ui("My.run"):
            log("reward 0.5")
            stage(flow_run)
        return flow_run

    flow_run, heard = heard_of(training)
    assert (heard.lines, heard.stages) == (["reward 0.5"], ["iteration 1: collect rollouts"])
    ((key, text, percent),) = seen
    # The update of the stage's begin may still be under way when the next one comes, which is then dropped.
    assert key == "grpo-my-run-collect-rollouts"
    assert (text, percent) in [(f"iteration 1: collect rollouts: {done} of 8", done * 12.5) for done in (0, 2)]
    assert bars(flow_run) == [(key, "iteration 1: collect rollouts: 8 of 8", 100.0)]
    lines = waited(lambda: read("/logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}))
    messages = [each["message"] for each in lines]
    assert "reward 0.5" in messages
    assert sum("Finished in state" in each for each in messages) <= 1


@pytest.mark.usefixtures("server")
def test_a_server_that_does_not_answer_never_slows_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_run_page, "SECONDS_BETWEEN_UPDATES", 0.0)
    answered = threading.Event()

    def hang(*_: object) -> None:
        answered.wait(30)

    monkeypatch.setattr(flow_run_page._FlowRunPage, "_send", hang)

    @flow
    def training() -> None:
        with shown_in_ui("slow"):
            report = progress_of("stage", 100)
            for done in range(1, 100):
                report(done)
            assert not answered.is_set()
            answered.set()

    training()


def test_keys_have_the_characters_that_prefect_allows() -> None:
    assert artifact_key("Tiny_2.5 (score r\u00b2)") == "grpo-tiny-2-5--score-r--"
