"""The forms of the flows: what the server refuses, and what a flow makes of the values."""

import asyncio
import copy
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow, flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError

from configs.loader import read_config
from flows.evaluation import evaluate
from flows.pipeline import prefect_ui as flow_run_page
from flows.pipeline.prefect_ui import artifact_key, form_schema, shown_in_ui
from flows.rescoring.rescore import rescore
from flows.training.train import train
from grpo_core.errors import InputError
from tasks.progress import log, progress_of
from tests.flows.conftest import TINY, TINY_BOTH, TINY_TEXT, Runs, heard_of
from tests.flows.deployment.test_deploy import MIX, asked_for, deployed, make_pool, on_the_server


@pytest.fixture(scope="module")
def pool(server: None) -> str:
    return make_pool()


@pytest.fixture(scope="module")
def form(pool: str) -> DeploymentResponse:
    """A training that was registered."""
    deployed(run="form")
    return on_the_server("form")["grpo train/form"]


def changed(values: Mapping[str, Any], *path: str, value: object) -> dict[str, Any]:
    mapping = copy.deepcopy(dict(values))
    place = mapping
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return mapping


class TestForm:
    @pytest.mark.parametrize("file", [TINY, pytest.param(TINY_TEXT, marks=pytest.mark.slow)])
    def test_the_server_takes_the_configuration_and_its_required_sections_alone(
        self, form: DeploymentResponse, file: Path
    ) -> None:
        if file != TINY:
            deployed(file, run="text")
            form = on_the_server("text")["grpo train/text"]
        config = form.parameters["config"]
        required = {name: config[name] for name in ("run", "policy", "data", "rollout", "rewards")}
        assert asked_for(form, {"config": config}, {"config": required}) == [None, None]

    def test_the_server_refuses_what_the_configuration_would(self, form: DeploymentResponse) -> None:
        config = form.parameters["config"]
        wrong: dict[tuple[str, ...], object] = {
            ("update", "learning_rat"): 1.0,
            ("update", "mismatch", "mod"): "none",
            ("trainer",): {},
            ("rollout", "group_size"): "8",
            ("rollout", "max_completion_length"): 9,
            ("advantages", "scale"): "grup",
            ("run", "name"): "../elsewhere",
        }
        without = {key: section for key, section in config.items() if key != "data"}
        values = [*(changed(config, *path, value=value) for path, value in wrong.items()), without]
        answers = asked_for(form, *({"config": each} for each in values))
        for name, answer in zip([*(path[-1] for path in wrong), "data"], answers, strict=True):
            assert name in str(answer)

    def test_a_run_of_a_deployment_may_change_settings(self, form: DeploymentResponse) -> None:
        config = form.parameters["config"]
        several = ({"overrides": ["run.iterations=3"]}, {"overrides": "run.iterations=3"})
        right, malformed = asked_for(form, *({"config": config, **each} for each in several))
        assert right is None
        assert "overrides" in str(malformed)
        wrong = train.fn(read_config(TINY), overrides=("run.iterations=0", "update.learning_rat=1"))
        with pytest.raises(InputError) as error:
            asyncio.run(wrong)
        assert [each.place for each in error.value.errors] == ["run.iterations", "update.learning_rat"]

    def test_the_other_flows_have_forms_too(self, pool: str) -> None:
        deployed(run="others", evaluate=True, rescore=(str(MIX),))
        found = on_the_server("others")
        evaluation, rescoring = found["grpo evaluate/others-evaluate"], found["grpo rescore/others-rescore-mix"]
        request, mix = evaluation.parameters["request"], rescoring.parameters["request"]
        wrong = [{"request": {**request, **each}} for each in ({"polcy": 3}, {"run": 3}, {"run": "others@3"})]
        right, unknown, malformed, other = asked_for(evaluation, {"request": request}, *wrong)
        assert (right, other) == (None, None)
        assert "polcy" in str(unknown)
        assert "request.run" in str(malformed)
        right, unknown = asked_for(rescoring, {"request": mix}, {"request": {**mix, "polcy": 3}})
        assert right is None
        assert "polcy" in str(unknown)

    @pytest.mark.parametrize("file", [TINY, TINY_TEXT, TINY_BOTH])
    def test_the_flow_reads_what_the_server_keeps(self, file: Path) -> None:
        config = read_config(file)
        read = train.validate_parameters({"config": json.loads(config.model_dump_json())})["config"]
        assert read == config
        assert train.validate_parameters({"config": config})["config"] is config

    def test_the_flow_reports_every_mistake_also_what_a_schema_cannot_say(self) -> None:
        values = read_config(TINY).model_dump(mode="json")
        message = unread(train, {"config": changed(values, "update", "minibatch_size", value=97)})
        assert "update.minibatch_size: got 97" in message
        values["update"]["learning_rat"] = 1.0
        values["rollout"]["group_size"] = 1
        del values["data"]
        message = unread(train, {"config": values})
        for mistake in ("update.learning_rat: got 'learning_rat'", "rollout.group_size: got 1", "data: got None"):
            assert mistake in message
        assert "overrides.0: got 3" in unread(evaluate, {"request": {"run": "tiny", "overrides": [3]}})
        assert "source: got" in unread(rescore, {"request": {"source": ["tiny"]}})


def unread(flow: Flow[..., Any], parameters: dict[str, Any]) -> str:
    with pytest.raises(ParameterTypeError) as caught:
        flow.validate_parameters(parameters)
    return str(caught.value)


def test_a_run_that_cannot_begin_says_why_in_its_state(empty: Runs) -> None:
    values = read_config(TINY, empty.overrides(run__name="requested")).model_dump(mode="json")
    state = asyncio.run(train(changed(values, "update", "learning_rat", value=1), return_state=True))
    assert state.is_failed()
    assert "update.learning_rat: got 'learning_rat'" in str(state.message)
    with pytest.raises(InputError):
        asyncio.run(train(changed(values, "data", "prompts", value="nowhere.jsonl")))
    assert not empty.path(run="requested").exists()


def test_the_form_begins_with_what_is_required_and_folds_the_rest() -> None:
    definitions = form_schema("config", read_config(TINY))["definitions"]
    sections = definitions["RunConfig"]["properties"]
    assert list(sections)[:5] == ["run", "policy", "data", "rollout", "rewards"]
    assert list(definitions["RunSection"]["properties"])[:2] == ["name", "iterations"]
    # The UI shows what is behind `$ref` field by field, and behind `oneOf` as JSON.
    assert sections["run"] == {"$ref": "#/definitions/RunSection"}
    assert sections["rollout"]["$ref"] == "#/definitions/GlmImageRolloutSection"
    folded = {name for name, section in sections.items() if section.get("oneOf")}
    assert folded == {"advantages", "update", "evaluate", "guardrails", "placement", "storage"}


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
    assert key == artifact_key("My.run-collect rollouts")
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


def test_keys_have_the_characters_that_prefect_allows_and_differ_where_names_do() -> None:
    names = ["a.b", "A-B", "a-b", "a_b", "a~b", "A.B", "Tiny_2.5 (score r\u00b2)", "a-b-report", "a.b-report"]
    keys = [artifact_key(name) for name in names]
    assert all(re.fullmatch("[a-z0-9-]+", key) for key in keys)
    assert len({*keys}) == len(names)
    assert artifact_key("tiny-report") == "grpo-tiny-report"
    assert artifact_key("tiny-collect rollouts") == "grpo-tiny-collect-rollouts"
