"""The forms of the flows: what the server refuses, and what a flow makes of the values."""

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ParameterTypeError

from configs.loader import read_config
from flows.evaluation.evaluate import evaluate
from flows.pipeline.forms import form_schema
from flows.rescoring.rescore import rescore
from flows.training.train import train
from grpo_core.errors import InputError
from tests.flows.conftest import TINY, TINY_BOTH, TINY_TEXT, Runs
from tests.flows.deployment.deployed import MIX, asked_for, deployed, make_pool, on_the_server


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
    def test_the_server_takes_the_configuration_and_its_required_sections_alone(
        self, form: DeploymentResponse, pool: str
    ) -> None:
        deployed(TINY_TEXT, run="text")
        deployed(TINY_BOTH, run="both")
        for found in (form, *(on_the_server(run)[f"grpo train/{run}"] for run in ("text", "both"))):
            config = found.parameters["config"]
            required = {name: config[name] for name in ("run", "policy", "data", "rollout", "rewards")}
            assert asked_for(found, {"config": config}, {"config": required}) == [None, None]

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
        answers = asked_for(form, *({"config": changed(config, *path, value=value)} for path, value in wrong.items()))
        for path, answer in zip(wrong, answers, strict=True):
            assert path[-1] in str(answer)

    def test_the_server_refuses_a_configuration_without_a_section(self, form: DeploymentResponse) -> None:
        without = {key: section for key, section in form.parameters["config"].items() if key != "data"}
        (answer,) = asked_for(form, {"config": without})
        assert "'data' is a required property" in str(answer)

    def test_the_other_flows_have_forms_too(self, pool: str) -> None:
        deployed(run="others", evaluate=True, rescore=(str(MIX),))
        found = on_the_server("others")
        evaluation, rescoring = found["grpo evaluate/others-evaluate"], found["grpo rescore/others-rescore-mix"]
        request, mix = evaluation.parameters["request"], rescoring.parameters["request"]
        wrong = [{"request": {**request, **each}} for each in ({"polcy": 3}, {"policy": "last"}, {"policy": 3})]
        right, unknown, malformed, other = asked_for(evaluation, {"request": request}, *wrong)
        assert (right, other) == (None, None)
        assert "polcy" in str(unknown)
        assert "'request.policy'" in str(malformed)
        right, unknown = asked_for(rescoring, {"request": mix}, {"request": {**mix, "polcy": 3}})
        assert right is None
        assert "polcy" in str(unknown)

    @pytest.mark.parametrize("file", [TINY, TINY_TEXT, TINY_BOTH])
    def test_the_flow_reads_what_the_server_keeps(self, file: Path) -> None:
        config = read_config(file)
        read = train.validate_parameters({"config": json.loads(config.model_dump_json())})["config"]
        assert read == config
        assert train.validate_parameters({"config": config})["config"] is config

    def test_the_flow_reports_every_mistake(self) -> None:
        values = read_config(TINY).model_dump(mode="json")
        values["update"]["learning_rat"] = 1.0
        values["rollout"]["group_size"] = 1
        del values["data"]
        message = unread(train, {"config": values})
        for mistake in ("update.learning_rat: got 1.0", "rollout.group_size: got 1", "data: got None"):
            assert mistake in message

    def test_the_flow_refuses_what_a_schema_cannot_say(self) -> None:
        values = changed(read_config(TINY).model_dump(mode="json"), "update", "minibatch_size", value=97)
        assert "update.minibatch_size: got 97" in unread(train, {"config": values})
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
    assert "update.learning_rat: got 1" in str(state.message)
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
