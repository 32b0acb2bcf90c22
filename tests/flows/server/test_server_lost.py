"""The server is killed during a run and comes back, or its database is lost; it marks runs whose process was killed."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server.heartbeat_automation import NAME, heartbeat_automation
from tests.flows.conftest import Runs, Start, printed_summary, training_process
from tests.flows.server.cloud_like import KEY, WORKSPACE
from tests.processes import wait_for
from tests.servers import GrpoUi, PostgresServer, grpo_ui

pytestmark = pytest.mark.slow

SILENT = 75.0
"""Seconds without a heartbeat for this test; Prefect sends one every 30 s at most."""
ALIVE = """
import flows, sys, time
from prefect import flow

@flow(name=sys.argv[1])
async def alive():
    print("begun", flush=True)
    time.sleep(900)

import asyncio
asyncio.run(alive())
"""


def client_environment(ui: GrpoUi, home: Path) -> Mapping[str, str]:
    own = {"PREFECT_API_URL": ui.api_url, "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in ui.environment.items() if "DATABASE" not in name} | own


def flow_runs(ui: GrpoUi) -> dict[str, FlowRun]:
    with temporary_settings({PREFECT_API_URL: ui.api_url}), get_client(sync_client=True) as client:
        return {client.read_flow(run.flow_id).name: run for run in client.read_flow_runs()}


def states(ui: GrpoUi, run: FlowRun) -> list[str]:
    with temporary_settings({PREFECT_API_URL: ui.api_url}), get_client(sync_client=True) as client:
        history: list[State[Any]] = client.read_flow_run_states(run.id)
    return [state.type.value for state in history]


@contextmanager
def flow_process(ui: GrpoUi, home: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", ALIVE, name],
        env=client_environment(ui, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("lost", ["server", "database"])
def test_a_run_survives_the_loss_and_ends_the_same(
    postgres: PostgresServer, empty: Runs, undisturbed: tuple[Runs, Start], tmp_path: Path, lost: str
) -> None:
    postgres.sql(f"CREATE DATABASE lost_{lost}")
    environment = {"PREFECT_API_DATABASE_CONNECTION_URL": postgres.url(f"lost_{lost}")}
    with grpo_ui(tmp_path / "server", environment) as ui:
        with training_process(empty, tmp_path / "run", environment={"PREFECT_API_URL": ui.api_url}) as child:
            wait_for(empty.path("iteration_000001", "rollouts.manifest.json").exists, 240)
            if lost == "server":
                assert ui.end(signal.SIGKILL) == -signal.SIGKILL
                ui.start()
            else:
                postgres.stop()
                time.sleep(10)
                postgres.start()
            assert child.wait(400) == 0, (tmp_path / "run" / "err").read_text()
        assert printed_summary(tmp_path / "run")["policy_digest"] == undisturbed[1].summary.policy_digest
        assert empty.tables() == undisturbed[0].tables()
        run = flow_runs(ui)["grpo train"]
        assert states(ui, run)[-1] == "COMPLETED"


async def shorten_timeout(ui: GrpoUi) -> None:
    """Have the automation wait for SILENT seconds only."""
    wanted = heartbeat_automation()
    trigger = wanted.trigger.model_copy(update={"within": timedelta(seconds=SILENT)})
    with temporary_settings({PREFECT_API_URL: ui.api_url}):
        async with get_client() as client:
            (found,) = await client.read_automations_by_name(NAME)
            await client.update_automation(found.id, wanted.model_copy(update={"trigger": trigger}))


def test_only_runs_of_ours_that_died_are_marked_as_crashed(tmp_path: Path) -> None:
    with grpo_ui(tmp_path / "server", {}) as ui:
        asyncio.run(shorten_timeout(ui))
        with (
            flow_process(ui, tmp_path / "ours", "grpo alive") as ours,
            flow_process(ui, tmp_path / "others", "another project's") as others,
        ):
            time.sleep(SILENT + 15)
            runs = flow_runs(ui)
            assert (ours.poll(), others.poll()) == (None, None)
            assert states(ui, runs["grpo alive"]) == ["PENDING", "RUNNING"]
            for process in (ours, others):
                os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: states(ui, runs["grpo alive"])[-1] == "CRASHED", SILENT + 60)
            assert states(ui, runs["another project's"]) == ["PENDING", "RUNNING"]


def test_a_run_continues_from_its_folder_alone(undisturbed: tuple[Runs, Start], tmp_path: Path) -> None:
    golden, first = undisturbed
    runs = Runs(tmp_path / "elsewhere")
    shutil.copytree(golden.path(), runs.path())
    for name in ("iteration_000002", "policies/000002"):
        shutil.rmtree(runs.path(name))
    runs.path("policies/000002.manifest.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in runs.path().rglob("*.parquet") if path.name != "metrics.parquet"}
    assert len(kept) > 4
    # Without an address it starts a temporary server, whose database has never seen the run.
    with training_process(runs, tmp_path / "process", environment={"PREFECT_API_URL": ""}) as training:
        assert training.wait() == 0, (tmp_path / "process" / "err").read_text()
    assert printed_summary(tmp_path / "process")["policy_digest"] == first.summary.policy_digest
    assert runs.tables() == golden.tables()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


PATIENCE_SECONDS = 180.0


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its address, and the file of what it refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refused = tmp_path / "refused"
    command = [sys.executable, "-m", "tests.flows.server.cloud_like", str(port), str(refused)]
    process = subprocess.Popen(
        command, env={"PYTHONPATH": os.environ["PYTHONPATH"], "PREFECT_HOME": str(tmp_path / "server")}
    )
    limit = time.monotonic() + PATIENCE_SECONDS
    try:
        while True:
            assert process.poll() is None
            assert time.monotonic() < limit
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.2)
        refused.write_text("")
        yield f"http://127.0.0.1:{port}", refused
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_training_sends_its_key_and_needs_no_admin_route(cloud: tuple[str, Path], tmp_path: Path) -> None:
    url, refused = cloud
    environment = {
        "PREFECT_CLOUD_API_URL": f"{url}/api",
        "PREFECT_API_URL": f"{url}{WORKSPACE}",
        "PREFECT_API_KEY": KEY,
    }
    folder, runs = tmp_path / "said", Runs(tmp_path / "runs")
    with training_process(runs, folder, environment=environment, run__iterations=1) as process:
        assert process.wait(PATIENCE_SECONDS) == 0, (folder / "err").read_text()
    # Prefect itself looks there for a default of the server, and goes on without.
    assert set(refused.read_text().splitlines()) <= {f"404 {WORKSPACE}/admin/storage"}
