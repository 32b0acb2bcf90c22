"""prefect.yaml: what `prefect deploy` registers is what `grpo deploy configs/tiny.yaml` registers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.loader import read_config
from configs.schema import RunConfig
from flows.deploy import ONE_AT_A_TIME, deploy_run, job_variables
from flows.pipeline.requests import DeployRequest
from flows.training.train import train
from tests.flows.conftest import REPOSITORY, TINY, Runs, Start
from tests.flows.server.grpo_ui import GrpoUi, grpo_ui


def test_it_is_the_training_of_the_shipped_configuration() -> None:
    (described,) = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert described["entrypoint"] == f"{train.fn.__module__}.{train.fn.__name__}"
    assert train.validate_parameters(described["parameters"])["config"] == read_config(TINY)
    assert described["work_pool"]["job_variables"] == job_variables("process")
    strategy = ONE_AT_A_TIME.collision_strategy.value
    assert described["concurrency_limit"] == {"limit": 1, "collision_strategy": strategy}


POOL = "nightly"
_PATIENCE_SECONDS = 300.0


@contextmanager
def worker(ui: GrpoUi, home: Path) -> Iterator[psutil.Process]:
    """Prefect's own worker of a process pool, in the checkout."""
    command = [str(Path(sys.executable).with_name("prefect")), "worker", "start", "--pool", POOL]
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
    (deployment,) = (await deploy_run(DeployRequest(pool=POOL, cron="* * * * *"), config)).deployments
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
        await deploy_run(DeployRequest(pool=POOL, cron=""), config)
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
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
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
