"""`grpo deploy` and the forms: what the server is told, what it refuses, and what the flow makes of it."""

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ParameterTypeError, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from configs.loader import read_config
from configs.schema import PictureRunConfig, TextRunConfig
from flows.command_line import application
from flows.deploy import DeployedRun, DeployRequest, deploy_run
from flows.deployments import credential_problems
from flows.evaluate import evaluate
from flows.rescore import rescore
from flows.server.silent_runs import NAME as AUTOMATION
from flows.train import train
from grpo_core.errors import InputError, InputErrors
from tasks.checkout import CHECKOUT

from .conftest import REPOSITORY, TINY, TINY_TEXT, Runs

POOL = "deploy-tests"
MIX = REPOSITORY / "configs" / "rewards" / "mix.yaml"


@pytest.fixture(scope="module")
def pool(server: None) -> str:
    async def made() -> None:
        async with get_client() as client:
            try:
                await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            except ObjectAlreadyExists:
                return

    asyncio.run(made())
    return POOL


@pytest.fixture(scope="module")
def form(pool: str) -> DeploymentResponse:
    """A training that was registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        deployed(run="form")
        return on_the_server("form")["grpo train/form"]


def deployed(file: Path = TINY, run: str = "nightly", **asked: Any) -> DeployedRun:
    config = read_config(file, [f"run.name={run}", *asked.pop("overrides", ())])
    return asyncio.run(deploy_run(DeployRequest(config, pool=POOL, **asked)))


def on_the_server(run: str) -> dict[str, DeploymentResponse]:
    """Deployments with the run's tag, by the name of their flow and their own."""

    async def read() -> dict[str, DeploymentResponse]:
        async with get_client() as client:
            tagged = DeploymentFilter(tags=DeploymentFilterTags(all_=["grpo", run]))
            found = await client.read_deployments(deployment_filter=tagged)
            flows = {each.flow_id: (await client.read_flow(each.flow_id)).name for each in found}
            return {f"{flows[each.flow_id]}/{each.name}": each for each in found}

    return asyncio.run(read())


def asked_for(deployment: DeploymentResponse, *several: Mapping[str, Any]) -> list[str | None]:
    """What the server says against flow runs with these parameters; None where it accepts them."""

    async def create(client: PrefectClient, parameters: Mapping[str, Any]) -> str | None:
        try:
            run = await client.create_flow_run_from_deployment(deployment.id, parameters=dict(parameters))
        except PrefectHTTPStatusError as error:
            return str(error.response.json()["detail"])
        await client.delete_flow_run(run.id)
        return None

    async def create_all() -> list[str | None]:
        async with get_client() as client:
            return [await create(client, parameters) for parameters in several]

    return asyncio.run(create_all())


def changed(values: Mapping[str, Any], *path: str, value: object) -> dict[str, Any]:
    mapping = copy.deepcopy(dict(values))
    place = mapping
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return mapping


class TestRegistered:
    def test_training_alone_by_default(self, pool: str) -> None:
        told = deployed(run="alone")
        (name, found), *others = on_the_server("alone").items()
        assert (name, others) == ("grpo train/alone", [])
        assert [each.name for each in told.deployments] == [name]
        assert found.parameters == {"config": read_config(TINY, ["run.name=alone"]).model_dump(mode="json")}
        assert (found.work_pool_name, found.tags) == (pool, ["grpo", "alone"])
        assert found.global_concurrency_limit is not None
        assert found.global_concurrency_limit.limit == 1
        assert found.concurrency_options is not None
        assert found.concurrency_options.collision_strategy == "CANCEL_NEW"
        assert found.schedules == []
        assert found.enforce_parameter_schema

    def test_a_second_time_brings_up_to_date_and_adds_nothing(self, pool: str) -> None:
        first = deployed(run="twice", cron="0 2 * * *", timezone="Europe/Berlin", evaluation=True, rescorings=(MIX,))
        names = ["grpo train/twice", "grpo evaluate/twice", "grpo rescore/twice-mix"]
        assert [(each.name, each.updated) for each in first.deployments] == [(name, False) for name in names]
        again = deployed(run="twice", cron="30 3 * * 1", evaluation=True, rescorings=(MIX,), overrides=["run.seed=7"])
        assert [(each.name, each.id, each.updated) for each in again.deployments] == [
            (each.name, each.id, True) for each in first.deployments
        ]
        found = on_the_server("twice")
        assert sorted(found) == sorted(names)
        assert found[names[0]].parameters["config"]["run"]["seed"] == 7
        (schedule,) = found[names[0]].schedules
        assert (schedule.schedule.cron, schedule.schedule.timezone, schedule.active) == ("30 3 * * 1", "UTC", True)
        assert [found[name].schedules for name in names[1:]] == [[], []]

    def test_a_schedule_stays_until_it_is_ended(self, pool: str) -> None:
        deployed(run="kept", cron="0 2 * * *", timezone="Europe/Berlin")
        assert deployed(run="kept").deployments[0].schedule == "0 2 * * * (Europe/Berlin)"
        (kept,) = on_the_server("kept")["grpo train/kept"].schedules
        assert (kept.schedule.cron, kept.schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
        assert deployed(run="kept", cron="").deployments[0].schedule is None
        assert on_the_server("kept")["grpo train/kept"].schedules == []

    def test_a_rescoring_names_its_file_as_workers_find_it(self, pool: str) -> None:
        deployed(run="scored", rescorings=(MIX,))
        asked = on_the_server("scored")["grpo rescore/scored-mix"].parameters["plan"]
        assert (asked["sources"], asked["rewards"], asked["name"]) == (["scored"], "configs/rewards/mix.yaml", "mix")
        assert (CHECKOUT / asked["rewards"]).is_file()

    def test_silent_runs_are_looked_after(self, pool: str) -> None:
        deployed(run="watched")

        async def automations() -> int:
            async with get_client() as client:
                return len(await client.read_automations_by_name(AUTOMATION))

        assert asyncio.run(automations()) == 1


class TestForm:
    def test_the_server_takes_the_configuration_and_its_required_sections_alone(
        self, form: DeploymentResponse, pool: str
    ) -> None:
        deployed(TINY_TEXT, run="text")
        for found in (form, on_the_server("text")["grpo train/text"]):
            config = found.parameters["config"]
            required = {name: config[name] for name in ("run", "policy", "data", "rollout", "rewards")}
            assert asked_for(found, {"config": config}, {"config": required}) == [None, None]

    @pytest.mark.parametrize(
        ("path", "value", "told"),
        [
            (("update", "learning_rat"), 1.0, "'config.update'. Failure reason: Additional properties are not allowed"),
            (("update", "mismatch", "mod"), "none", "'config.update.mismatch'. Failure reason: Additional properties"),
            (("trainer",), {}, "'config'. Failure reason: Additional properties are not allowed ('trainer' was"),
            (
                ("rollout", "group_size"),
                "8",
                "'config.rollout.group_size'. Failure reason: '8' is not of type 'integer'",
            ),
            (("rollout", "max_completion_length"), 9, "('max_completion_length' was unexpected)"),
            (("update", "loss"), "gppo", "'config.update.loss'. Failure reason: 'gppo' is not one of"),
            (("run", "name"), "../elsewhere", "'config.run.name'. Failure reason: '../elsewhere' does not match"),
        ],
    )
    def test_the_server_refuses_what_the_configuration_would(
        self, form: DeploymentResponse, path: tuple[str, ...], value: object, told: str
    ) -> None:
        config = form.parameters["config"]
        (answer,) = asked_for(form, {"config": changed(config, *path, value=value)})
        assert told in str(answer)

    def test_the_server_refuses_a_configuration_without_a_section(self, form: DeploymentResponse) -> None:
        without = {key: section for key, section in form.parameters["config"].items() if key != "data"}
        (answer,) = asked_for(form, {"config": without})
        assert "'data' is a required property" in str(answer)

    def test_the_other_flows_have_forms_too(self, pool: str) -> None:
        deployed(run="others", evaluation=True, rescorings=(MIX,))
        found = on_the_server("others")
        evaluation, rescoring = found["grpo evaluate/others"], found["grpo rescore/others-mix"]
        unknown = "Additional properties are not allowed ('polcy' was unexpected)"
        request, plan = evaluation.parameters["request"], rescoring.parameters["plan"]
        wrong = [{"request": {**request, **each}} for each in ({"polcy": 3}, {"policy": "last"}, {"policy": 3})]
        told = asked_for(evaluation, {"request": request}, *wrong)
        assert (told[0], told[3]) == (None, None)
        assert unknown in str(told[1])
        assert "'request.policy'" in str(told[2])
        told = asked_for(rescoring, {"plan": plan}, {"plan": {**plan, "polcy": 3}})
        assert told[0] is None
        assert unknown in str(told[1])

    @pytest.mark.parametrize(("file", "kind"), [(TINY, PictureRunConfig), (TINY_TEXT, TextRunConfig)])
    def test_the_flow_reads_what_the_server_keeps(self, file: Path, kind: type) -> None:
        config = read_config(file)
        read = train.validate_parameters({"config": json.loads(config.model_dump_json())})["config"]
        assert read == config
        assert type(read) is kind
        assert train.validate_parameters({"config": config})["config"] is config

    def test_the_flow_tells_every_mistake_with_its_mend(self) -> None:
        values = read_config(TINY).model_dump(mode="json")
        values["update"]["learning_rat"] = 1.0
        values["rollout"]["group_size"] = 1
        del values["data"]
        told = unread(train, {"config": values})
        assert "update.learning_rat: got 1.0. There is no such key: did you mean learning_rate?" in told
        assert "rollout.group_size: got 1. Input should be greater than or equal to 2." in told
        assert "data: got None. It is missing and has no default; add it." in told

    def test_the_flow_refuses_what_a_schema_cannot_say(self) -> None:
        values = changed(read_config(TINY).model_dump(mode="json"), "update", "minibatch_size", value=97)
        assert "update.minibatch_size: got 97. An iteration has 96 rows" in unread(train, {"config": values})
        assert "overrides.0" in unread(evaluate, {"request": {"run": "tiny", "overrides": [3]}})
        assert "There is no such key: did you mean sources?" in unread(rescore, {"plan": {"source": ["tiny"]}})


def unread(flow: Flow[..., Any], parameters: dict[str, Any]) -> str:
    with pytest.raises(ParameterTypeError) as caught:
        flow.validate_parameters(parameters)
    return str(caught.value)


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--cron", "0 2 * *"], "--cron: got '0 2 * *'. Write minute, hour"),
            (["--cron", "0 2 * * *", "--timezone", "Mars"], "--timezone: got 'Mars'. Write a name of the tz database"),
            (["--name", "a/b"], "--name: got 'a/b'. Letters, digits"),
            (["--rescore", "nowhere.yaml"], "--rescore: got 'nowhere.yaml'. Give a readable YAML file"),
            (["--rescore", str(MIX), "--rescore", str(MIX)], "which must differ"),
            (["--pool", "nowhere"], "--pool: got 'nowhere'. The server has no such work pool"),
            (["--set", "storage.root=s3://key:secret@host/runs"], "storage.root: got 's3://***@host/runs'"),
        ],
    )
    def test_in_one_message_with_nothing_registered(self, pool: str, arguments: list[str], told: str) -> None:
        given = ["deploy", str(TINY), "--run", "refused", "--pool", pool, *arguments]
        ended = CliRunner().invoke(application, given)
        assert ended.exit_code == 2, ended.output
        assert ended.stderr.startswith("error: ")
        assert told in ended.stderr
        assert "secret" not in ended.output
        assert on_the_server("refused") == {}

    def test_without_a_server(self) -> None:
        with temporary_settings({PREFECT_API_URL: None}):
            ended = CliRunner().invoke(application, ["deploy", str(TINY)])
        assert ended.exit_code == 2
        assert "none is configured: start one with `grpo ui`" in ended.stderr

    def test_with_a_server_that_does_not_answer(self) -> None:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            ended = CliRunner().invoke(application, ["deploy", str(TINY)])
        assert ended.exit_code == 2
        assert "PREFECT_API_URL: got 'http://127.0.0.1:9/api'. No server answers there" in ended.stderr

    def test_credentials_are_found_wherever_they_stand(self) -> None:
        values = {"a": [{"b": "https://user:word@host/x"}], "c": "s3://bucket/key", "d": "mail@host", "e": 3}
        (found,) = credential_problems(values)
        assert (found.place, found.value) == ("a.0.b", "https://***@host/x")


def test_the_command_prints_one_json_object(pool: str) -> None:
    given = ["deploy", str(TINY), "--run", "told", "--pool", pool, "--cron", "0 2 * * *", "--evaluate", "--json"]
    ended = CliRunner().invoke(application, given)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout.splitlines()[-1])
    assert [each["name"] for each in told["deployments"]] == ["grpo train/told", "grpo evaluate/told"]
    assert (told["pool"], told["pool_type"], told["root"]) == (POOL, "process", "runs")
    assert f"prefect worker start --pool {POOL}" in ended.stderr
    assert "0 2 * * * (UTC)" in ended.stderr


def test_a_run_that_cannot_begin_says_why_in_its_state(empty: Runs) -> None:
    values = read_config(TINY, empty.overrides(run__name="asked")).model_dump(mode="json")
    state = asyncio.run(train(changed(values, "update", "learning_rat", value=1), return_state=True))
    assert state.is_failed()
    assert "There is no such key: did you mean learning_rate?" in str(state.message)
    with pytest.raises((InputError, InputErrors, ParameterTypeError)):
        asyncio.run(train(changed(values, "data", "prompts", value="nowhere.jsonl")))
    assert not empty.path(run="asked").exists()
