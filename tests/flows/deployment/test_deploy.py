"""`grpo deploy`: what the server is told, what a second time changes, and what is refused."""

import asyncio
import json

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.deployment.deploy import credential_problems, deploy_run
from flows.pipeline.requests import DeployRequest
from flows.server.heartbeat_automation import HEARTBEAT_TIMEOUT
from flows.server.heartbeat_automation import NAME as AUTOMATION
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT
from tests.flows.conftest import TINY
from tests.flows.deployment.deployed import MIX, POOL, deployed, make_pool, on_the_server


@pytest.fixture(scope="module")
def pool(server: None) -> str:
    return make_pool()


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
        # Without the first, the automation takes runs of Prefect's own workers for dead.
        assert found.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(
            int(HEARTBEAT_TIMEOUT.seconds / 2.5)
        )
        assert found.job_variables["working_dir"] == "."
        assert found.enforce_parameter_schema
        # Silent runs are looked after.
        with get_client(sync_client=True) as client:
            assert len(client.read_automations_by_name(AUTOMATION)) == 1

    def test_a_second_time_brings_up_to_date_and_adds_nothing(self, pool: str) -> None:
        first = deployed(run="twice", cron="0 2 * * *", timezone="Europe/Berlin", evaluate=True, rescore=(str(MIX),))
        names = ["grpo train/twice", "grpo evaluate/twice-evaluate", "grpo rescore/twice-rescore-mix"]
        assert [(each.name, each.updated) for each in first.deployments] == [(name, False) for name in names]
        again = deployed(run="twice", cron="30 3 * * 1", evaluate=True, rescore=(str(MIX),), overrides=["run.seed=7"])
        assert [(each.name, each.id, each.updated) for each in again.deployments] == [
            (each.name, each.id, True) for each in first.deployments
        ]
        found = on_the_server("twice")
        assert sorted(found) == sorted(names)
        assert found[names[0]].parameters["config"]["run"]["seed"] == 7
        (schedule,) = found[names[0]].schedules
        assert (schedule.schedule.cron, schedule.schedule.timezone, schedule.active) == ("30 3 * * 1", "UTC", True)
        assert [found[name].schedules for name in names[1:]] == [[], []]
        # A rescoring names its file as workers find it.
        request = found[names[2]].parameters["request"]
        rescoring = (request["sources"], request["rewards"], request["name"])
        assert rescoring == (["twice"], "configs/rewards/mix.yaml", "mix")
        assert (CHECKOUT / request["rewards"]).is_file()

    def test_a_schedule_stays_as_a_person_changed_it_until_it_is_ended(self, pool: str) -> None:
        deployed(run="kept", cron="0 2 * * *", timezone="Europe/Berlin")
        given = {"parameters": {"config": {"run": {"name": "kept"}}}, "slug": "nightly"}

        async def change() -> None:
            async with get_client() as client:
                found = await client.read_deployment_by_name("grpo train/kept")
                (schedule,) = found.schedules
                await client.delete_deployment_schedule(found.id, schedule.id)
                requested = {"schedule": schedule.schedule.model_dump(mode="json"), "active": True, **given}
                await client.request(
                    "POST", "/deployments/{id}/schedules", path_params={"id": found.id}, json=[requested]
                )

        asyncio.run(change())
        told = deployed(run="kept", overrides=["run.seed=7"])
        assert told.deployments[0].schedule == "0 2 * * * (Europe/Berlin)"
        (kept,) = on_the_server("kept")["grpo train/kept"].schedules
        assert (kept.schedule.cron, kept.schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
        assert kept.model_dump(include=set(given)) == given
        assert deployed(run="kept", cron="").deployments[0].schedule is None
        assert on_the_server("kept")["grpo train/kept"].schedules == []

    def test_a_missing_pool_is_created_for_our_workers(self, pool: str) -> None:
        file = read_config(TINY, ["run.name=first"])
        told = asyncio.run(deploy_run(DeployRequest(pool="made-by-deploy"), file))
        assert (told.pool, told.pool_type) == ("made-by-deploy", "grpo")

    def test_a_container_pool_gets_the_image_and_enters_its_checkout(self, pool: str) -> None:
        async def pods() -> None:
            async with get_client() as client:
                await client.create_work_pool(WorkPoolCreate(name="pods", type="kubernetes"))

        asyncio.run(pods())
        request = DeployRequest(pool="pods", image="registry/grpo:1")
        asyncio.run(deploy_run(request, read_config(TINY, ["run.name=podded", "storage.root=s3://bucket/runs"])))
        found = on_the_server("podded")["grpo train/podded"]
        assert found.job_variables["image"] == "registry/grpo:1"
        assert "working_dir" not in found.job_variables
        step = "prefect.deployments.steps.set_working_directory"
        assert found.pull_steps == [{step: {"directory": "/grpo"}}]
        for changed, root, place in (
            (DeployRequest(pool="pods"), "s3://bucket/runs", "--image"),
            (request, "runs", "storage.root"),
            (DeployRequest(pool="nowhere", image="registry/grpo:1"), "s3://bucket/runs", "--pool"),
        ):
            config = read_config(TINY, ["run.name=refused", f"storage.root={root}"])
            with pytest.raises(InputError) as refused:
                asyncio.run(deploy_run(changed, config))
            assert refused.value.place == place
        assert on_the_server("refused") == {}


WRONG: list[tuple[list[str], str, object]] = [
    (["--cron", "0 2 * *"], "--cron", "0 2 * *"),
    (["--cron", "0 2 * * *", "--timezone", "Mars"], "--timezone", "Mars"),
    (["--cron", "* * * * * *"], "--cron", "* * * * * *"),
    (["--cron", "0 2 30 2 *"], "--cron", "0 2 30 2 *"),
    (["--cron", "0 2 * * *", "--timezone", ""], "--timezone", ""),
    (["--timezone", "Mars/X"], "--timezone", "Mars/X"),
    (["--name", "a/b"], "--name", "a/b"),
    (["--rescore", "nowhere.yaml"], "--rescore", "nowhere.yaml"),
    (["--rescore", str(MIX), "--rescore", str(MIX)], "--rescore", [str(MIX)] * 2),
    (["--image", "registry/grpo"], "--image", "registry/grpo"),
    (["--set", "storage.root=s3://key:secret@host/runs"], "storage.root", "s3://***@host/runs"),
]


class TestRefused:
    def test_in_one_message_with_nothing_registered(self, pool: str) -> None:
        for arguments, place, value in WRONG:
            given = ["deploy", str(TINY), "--run", "refused", "--pool", pool, *arguments]
            ended = CliRunner().invoke(application, given)
            assert ended.exit_code == 2, ended.output
            assert f"error: {place}: got {value!r}" in ended.stderr
            assert "secret" not in ended.output
        assert on_the_server("refused") == {}

    def test_credentials_are_found_wherever_they_stand(self) -> None:
        values = {"a": [{"b": "https://user:word@host/x"}], "c": "s3://bucket/key", "d": "mail@host", "e": 3}
        (found,) = credential_problems(values)
        assert (found.place, found.value) == ("a.0.b", "https://***@host/x")


def test_the_command_prints_one_json_object(pool: str) -> None:
    given = ["deploy", str(TINY), "--run", "told", "--pool", pool, "--cron", "0 2 * * *", "--evaluate", "--json"]
    ended = CliRunner().invoke(application, given)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout.splitlines()[-1])
    assert [each["name"] for each in told["deployments"]] == ["grpo train/told", "grpo evaluate/told-evaluate"]
    assert (told["pool"], told["pool_type"], told["root"]) == (POOL, "process", "runs")
    assert f"prefect worker start --pool {POOL}" in ended.stderr
    assert "0 2 * * * (UTC)" in ended.stderr
