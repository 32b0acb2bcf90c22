"""`grpo deploy`: what the server is told, what a second time changes, what is refused, and what a schedule starts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from configs.loader import read_config
from configs.schema import RunConfig
from flows.command_line.main import application
from flows.deploy import ONE_AT_A_TIME, DeployedRun, deploy_run, job_variables
from flows.requests import DeployRequest
from flows.server.heartbeat_automation import NAME as AUTOMATION
from flows.training.train import train
from grpo_core.errors import InputError
from tasks.process import CHECKOUT
from tests.flows.conftest import REPOSITORY, TINY, Runs, Start
from tests.servers import GrpoUi, grpo_ui

POOL = "deploy-tests"
MIX = REPOSITORY / "configs" / "rewards" / "mix.yaml"


def make_pool() -> str:
    """A pool without workers."""

    async def made() -> None:
        async with get_client() as client:
            try:
                await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            except ObjectAlreadyExists:
                return

    asyncio.run(made())
    return POOL


def deployed(file: Path = TINY, run: str = "nightly", **requested: Any) -> DeployedRun:
    config = read_config(file, [f"run.name={run}", *requested.pop("overrides", ())])
    return asyncio.run(deploy_run(DeployRequest(pool=POOL, **requested), config))


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


@pytest.fixture(scope="module")
def pool(server: None) -> str:
    return make_pool()


def by_the_command(run: str, *options: str) -> dict[str, Any]:
    """Deploy a run's training to a pool; what is printed."""
    given = ["deploy", str(TINY), "--run", run, "--pool", "made-by-deploy", *options, "--json"]
    ended = CliRunner().invoke(application, given)
    assert ended.exit_code == 0, ended.output
    printed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return printed


@pytest.fixture(scope="class")
def alone(server: None) -> dict[str, Any]:
    """A training, its evaluation, its verification and a rescoring, deployed at a server without their pool."""
    also = ("--evaluate", "--verify", "--rescore", str(MIX))
    return by_the_command("alone", "--cron", "0 2 * * *", "--timezone", "Europe/Berlin", *also)


async def replace_schedule(name: str, changed: Mapping[str, Any]) -> None:
    """As a person does in the UI."""
    async with get_client() as client:
        found = await client.read_deployment_by_name(name)
        (schedule,) = found.schedules
        await client.delete_deployment_schedule(found.id, schedule.id)
        requested = {"schedule": schedule.schedule.model_dump(mode="json"), "active": True, **changed}
        await client.request("POST", "/deployments/{id}/schedules", path_params={"id": found.id}, json=[requested])


class TestRegistered:
    def test_by_the_command_on_a_pool_and_a_server_that_are_made_ready(self, alone: dict[str, Any]) -> None:
        others = ["grpo evaluate/alone-evaluate", "grpo verify/alone-verify", "grpo rescore/alone-rescore-mix"]
        names = ["grpo train/alone", *others]
        assert [(each["name"], each["updated"]) for each in alone["deployments"]] == [(name, False) for name in names]
        assert (alone["pool"], alone["pool_type"], alone["root"]) == ("made-by-deploy", "grpo", "runs")
        assert alone["deployments"][0]["schedule"] == "0 2 * * * (Europe/Berlin)"
        with get_client(sync_client=True) as client:
            assert len(client.read_automations_by_name(AUTOMATION)) == 1
        found = on_the_server("alone")
        training, evaluation, verification, rescoring = (found[name] for name in names)
        assert verification.parameters["request"]["run"] == "alone"
        assert training.parameters == {"config": read_config(TINY, ["run.name=alone"]).model_dump(mode="json")}
        assert (training.work_pool_name, training.tags) == ("made-by-deploy", ["grpo", "alone"])
        assert training.global_concurrency_limit is not None
        assert training.global_concurrency_limit.limit == 1
        assert training.concurrency_options == ONE_AT_A_TIME
        assert training.job_variables == job_variables("grpo")
        assert training.enforce_parameter_schema
        assert (evaluation.schedules, rescoring.schedules) == ([], [])
        # A rescoring names its file as workers find it.
        request = rescoring.parameters["request"]
        named = (request["sources"], request["rewards"], request["name"])
        assert named == (["alone"], "configs/rewards/mix.yaml", "mix")
        assert (CHECKOUT / request["rewards"]).is_file()

    def test_the_command_once_more_keeps_the_schedule_as_a_person_changed_it(self, alone: dict[str, Any]) -> None:
        changed = {"active": False, "parameters": {"config": {"run": {"name": "alone"}}}, "slug": "nightly"}
        asyncio.run(replace_schedule("grpo train/alone", changed))
        (again,) = by_the_command("alone", "--set", "run.seed=7")["deployments"]
        assert (again["id"], again["updated"]) == (alone["deployments"][0]["id"], True)
        training = on_the_server("alone")["grpo train/alone"]
        assert training.parameters["config"]["run"]["seed"] == 7
        (kept,) = training.schedules
        assert (kept.schedule.cron, kept.schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
        assert kept.model_dump(include=set(changed)) == changed
        assert by_the_command("alone", "--cron", "")["deployments"][0]["schedule"] is None
        assert on_the_server("alone")["grpo train/alone"].schedules == []

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


def test_it_is_the_training_of_the_shipped_configuration() -> None:
    (described,) = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert described["entrypoint"] == f"{train.fn.__module__}.{train.fn.__name__}"
    assert train.validate_parameters(described["parameters"])["config"] == read_config(TINY)
    assert described["work_pool"]["job_variables"] == job_variables("process")
    strategy = ONE_AT_A_TIME.collision_strategy.value
    assert described["concurrency_limit"] == {"limit": 1, "collision_strategy": strategy}


NIGHTLY = "nightly"
_PATIENCE_SECONDS = 300.0


@contextmanager
def worker(ui: GrpoUi, home: Path) -> Iterator[psutil.Process]:
    """Prefect's own worker of a process pool, in the checkout."""
    command = [str(Path(sys.executable).with_name("prefect")), "worker", "start", "--pool", NIGHTLY]
    environment = ui.environment | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": ui.api_url,
        "PREFECT_WORKER_QUERY_SECONDS": "0.5",
        "OMP_NUM_THREADS": "1",
    }
    home.mkdir()
    with (home / "said").open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        yield psutil.Process(process.pid)
    finally:
        # The runs that it started are in its group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def standing_still(worker: psutil.Process) -> Iterator[None]:
    """The run that the worker has started, so that it cannot end before a second one is refused."""
    started = worker.children(recursive=True)
    assert started
    for process in started:
        process.suspend()
    try:
        yield
    finally:
        for process in started:
            process.resume()


async def until(found: Callable[[], Awaitable[FlowRun | None]], what: str) -> FlowRun:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (run := await found()) is None:
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.25)
    return run


async def fires_once(client: PrefectClient, worker: psutil.Process, config: RunConfig) -> tuple[FlowRun, FlowRun]:
    """The run that the schedule starts, and one by hand while that is at work, both as they ended."""
    (deployment,) = (await deploy_run(DeployRequest(pool=NIGHTLY, cron="* * * * *"), config)).deployments
    tried = FlowRunFilterDeploymentId(any_=[deployment.id])

    async def begun() -> FlowRun | None:
        runs = await client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id=tried))
        return next((run for run in runs if run.state_type is StateType.RUNNING), None)

    def ended(run: FlowRun) -> Callable[[], Awaitable[FlowRun | None]]:
        async def read() -> FlowRun | None:
            found = await client.read_flow_run(run.id)
            return found if found.state is not None and found.state.is_final() else None

        return read

    first = await until(begun, "the schedule did not fire")
    with standing_still(worker):
        # It would fire again every minute.
        await deploy_run(DeployRequest(pool=NIGHTLY, cron=""), config)
        second = await client.create_flow_run_from_deployment(first.deployment_id or "")
        cancelled = await until(ended(second), "the second run was not cancelled")
    return await until(ended(first), "the first run did not end"), cancelled


@pytest.mark.slow
def test_a_schedule_fires_and_a_second_run_of_the_name_is_cancelled(
    undisturbed: tuple[Runs, Start], tmp_path: Path
) -> None:
    runs = Runs(tmp_path / "runs")
    config = read_config(TINY, runs.overrides(run__name="run"))

    async def both() -> tuple[FlowRun, FlowRun]:
        async with get_client() as client:
            await client.create_work_pool(WorkPoolCreate(name=NIGHTLY, type="process"))
            with worker(ui, tmp_path / "worker") as nightly:
                return await fires_once(client, nightly, config)

    with grpo_ui(tmp_path / "server", {}) as ui, temporary_settings({PREFECT_API_URL: ui.api_url}):
        first, second = asyncio.run(both())
    said = (tmp_path / "worker" / "said").read_text()
    assert first.auto_scheduled, first
    assert first.state is not None
    assert first.state.is_completed(), f"{first.state}\n{said}"
    assert (first.name, set(first.tags)) == ("run", {"grpo", "run", "auto-scheduled"})
    assert second.state is not None
    assert second.state.is_cancelled(), second.state
    assert second.state.message == "Deployment concurrency limit reached."
    assert second.run_count == 0
    assert runs.tables() == undisturbed[0].tables()
