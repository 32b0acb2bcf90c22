"""Stages on work pools: the same run as in one process, one model load a worker, workers that die or freeze."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import psutil
import pytest
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.loader import read_config
from flows.deploy import DeployedRun, deploy_run
from flows.requests import DeployRequest
from flows.training.summary import TrainSummary
from tests import processes
from tests.flows.conftest import TINY, Runs, printed_summary, training_process
from tests.servers import grpo_ui, postgres_server

SECONDS_TO_START = 240.0


@dataclass
class Worker:
    """One worker's process and what it says."""

    pool: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def said(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for(self, text: str) -> None:
        def has_said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return any(text in line for line in self.said)

        processes.wait_for(has_said, SECONDS_TO_START, self.log.read_text)

    def kill(self) -> None:
        """As a machine that loses its power: the worker and what it started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for process in [psutil.Process(self.process.pid), *children]:
            process.kill()
        self.process.wait()


@dataclass
class Workers:
    """Workers of the session's server."""

    folder: Path
    all: list[Worker] = field(default_factory=list)

    def start(self, *pools: str) -> list[Worker]:
        server = PREFECT_API_URL.value()
        assert server is not None
        environment = {
            **os.environ,
            "PREFECT_API_URL": server,
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "2",
        }
        begun = []
        for pool in pools:
            log = self.folder / f"{pool}-{len(self.all)}.log"
            command = [sys.executable, "-m", "flows.command_line.main", "worker", pool]
            with log.open("wb") as stream:
                process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
            begun.append(Worker(pool, log, process))
            self.all.append(begun[-1])
        for worker in begun:
            worker.wait_for("started!")
        return begun


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As `grpo ui` with PostgreSQL: over SQLite the requests of several workers wait for each other."""
    home = tmp_path_factory.mktemp("server")
    with postgres_server() as postgres:
        postgres.sql("CREATE DATABASE prefect")
        database = {"PREFECT_API_DATABASE_CONNECTION_URL": postgres.url("prefect")}
        with grpo_ui(home, database) as ui, temporary_settings({PREFECT_API_URL: ui.api_url}):
            yield
            # What is sent later would be tried for minutes, and later tests would wait for it.
            APILogWorker.drain_all()
            EventsWorker.drain_all()


@pytest.fixture
def workers(server: None, tmp_path: Path) -> Iterator[Workers]:
    folder = tmp_path / "workers"
    folder.mkdir()
    workers = Workers(folder)
    yield workers
    for worker in workers.all:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    for worker in workers.all:
        worker.process.wait(60)
    # Other tests beside these have children as well.
    others = [process.info for process in psutil.process_iter(["cmdline", "ppid", "environ"])]
    ours = [each for each in others if (each["environ"] or {}).get("PREFECT_HOME") == str(folder / "home")]
    left = [each for each in ours if "tasks.execution.child_main" in (each["cmdline"] or ())]
    assert not [each for each in left if each["ppid"] == 1], "a worker left its child behind"


@pytest.fixture
def alone(tmp_path: Path, server: None) -> Callable[..., tuple[TrainSummary, Runs]]:
    """The same run in this process alone."""

    def start(**changes: object) -> tuple[TrainSummary, Runs]:
        runs = Runs(tmp_path / "alone")
        return runs.start(rollout__prompts_per_batch=1, **changes).summary, runs

    return start


def joined_tables(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Every table of a run by its folder, parts one after another."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, rows in sorted(runs.tables().items()):
        tables.setdefault(name.rpartition("/")[0], []).extend(rows)
    return tables


BEGUN = "collect rollouts on images: begun"
SECONDS_TO_TRAIN = 600.0
POOLED: dict[str, object] = {
    "rollout__prompts_per_batch": 1,
    "placement__rollouts__pool": "images",
    "placement__rollouts__shards": 2,
    "placement__rewards__pool": "scores",
    "placement__rewards__shards": 2,
    "placement__advantages__pool": "scores",
    "placement__update__pool": "images",
    "placement__retries__delay": 0.1,
}

pytestmark = pytest.mark.slow


def test_pools_and_shards_give_the_run_of_one_process(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]]
) -> None:
    first, second, scores = workers.start("images", "images", "scores")
    summary = empty.start(**POOLED).summary
    other, runs = alone()
    assert summary.policy_digest == other.policy_digest
    assert joined_tables(empty) == joined_tables(runs)
    assert len(list(empty.path("iteration_000001", "rollouts").glob("part-*.parquet"))) == 2
    for worker in (first, second):
        assert [line.startswith("loaded ") for line in worker.said].count(True) == 1
    assert not any(line.startswith("loaded ") for line in scores.said)
    assert not list(empty.path().rglob("shards"))
    assert not list(empty.path(".calls").iterdir())
    # The placement is no part of a stage's key.
    assert empty.start(rollout__prompts_per_batch=1).stages == ()


def test_a_worker_killed_in_its_stage_and_another_takes_it(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]], tmp_path: Path
) -> None:
    (first,) = workers.start("images")
    changes = {key: value for key, value in POOLED.items() if "rewards" not in key and "advantages" not in key}
    with training_process(empty, tmp_path, **changes) as run:
        first.wait_for("iteration 1, shard 1 of 2: collect rollouts on images: begun")
        first.kill()
        workers.start("images")
        assert run.wait(SECONDS_TO_START) == 0, (tmp_path / "err").read_text()
    other, runs = alone()
    assert printed_summary(tmp_path)["policy_digest"] == other.policy_digest
    assert joined_tables(empty) == joined_tables(runs)
    said = (tmp_path / "err").read_text()
    assert "of pool images has died" in said
    assert "attempt 2 of 3 follows" in said


def test_rollouts_ahead_of_the_updates(workers: Workers, empty: Runs) -> None:
    workers.start("images")
    settings: dict[str, object] = {"run__iterations": 4, "run__staleness": 1}
    pooled = empty.start(**settings, placement__rollouts__pool="images").summary
    versions = [
        set(pl.read_parquet(empty.path(f"iteration_{number:06d}", "rollouts", "part-*.parquet"))["policy_version"])
        for number in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {0}, {1}, {2}]
    here = Runs(empty.root.parent / "here")
    assert here.start(**settings).summary.policy_digest == pooled.policy_digest


@pytest.mark.parametrize("shards", [1, 2])
def test_an_interrupt_ends_a_waiting_run_and_cancels_its_stages(
    workers: Workers, empty: Runs, tmp_path: Path, shards: int
) -> None:
    # The pool exists and has no worker.
    (worker,) = workers.start("deserted")
    worker.kill()
    changes = {"rollout__prompts_per_batch": 1, "placement__rollouts__shards": shards}
    with training_process(empty, tmp_path, placement__rollouts__pool="deserted", **changes) as run:
        wait_for(lambda: (tmp_path / "err").read_text().count("sent to pool deserted") >= shards, tmp_path / "err")
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 1
    requested = {"deployments": {"name": {"any_": ["deserted"]}}}
    runs = httpx.post(f"{PREFECT_API_URL.value()}/flow_runs/filter", json=requested).json()
    states = [each["state_type"] for each in sorted(runs, key=lambda each: each["created"])[-shards:]]
    assert states == ["CANCELLED"] * shards


def on_one_pool(runs: Runs, name: str, pool: str) -> DeployedRun:
    """A training deployed to the pool that does its stages."""
    placed = {f"placement__{stage}__pool": pool for stage in ("rollouts", "rewards", "advantages", "update")}
    config = read_config(TINY, runs.overrides(run__name=name, placement__retries__delay=0.1, **placed))
    return asyncio.run(deploy_run(DeployRequest(pool=pool), config))


def started(training: DeployedRun) -> Callable[[], dict[str, Any]]:
    """A flow run of the training; how it stands."""
    server = PREFECT_API_URL.value()
    address = f"{server}/deployments/{training.deployments[0].id}/create_flow_run"
    requested = httpx.post(address, json={"state": {"type": "SCHEDULED"}}, timeout=60).raise_for_status().json()
    return lambda: dict(httpx.get(f"{server}/flow_runs/{requested['id']}", timeout=60).json())


def stages_of(name: str) -> dict[str, dict[str, Any]]:
    """Flow runs of a training's stages by their names, the latest of each."""
    requested = {"flow_runs": {"tags": {"all_": [name]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found = httpx.post(f"{PREFECT_API_URL.value()}/flow_runs/filter", json=requested, timeout=60).json()
    return {each["name"]: each for each in found if each["parent_task_run_id"]}


def wait_for(found: Callable[[], bool], log: Path) -> None:
    processes.wait_for(found, SECONDS_TO_TRAIN, log.read_text)


def cancel(flow_run: dict[str, Any]) -> None:
    """As the button in the UI does."""
    address = f"{PREFECT_API_URL.value()}/flow_runs/{flow_run['id']}/set_state"
    httpx.post(address, json={"state": {"type": "CANCELLING"}}, timeout=60).raise_for_status()


def test_one_worker_trains_and_does_the_stages_whichever_of_them_is_cancelled(
    workers: Workers, empty: Runs, tmp_path: Path
) -> None:
    (worker,) = workers.start("only")
    training = on_one_pool(empty, "run", "only")
    rollouts = "iteration 1: collect rollouts on only"

    # The stage is cancelled: the training says so and ends.
    state = started(training)
    wait_for(lambda: any(f"{rollouts}: begun" in line for line in worker.said), worker.log)
    cancel(stages_of("run")[rollouts])
    wait_for(lambda: state()["state_type"] == "FAILED", worker.log)
    assert "was cancelled" in state()["state"]["message"]
    wait_for(lambda: stages_of("run")[rollouts]["state_type"] == "CANCELLED", worker.log)

    # The training is cancelled while its stage is at work: it ends after the stage, or ends it with itself.
    state, previous = started(training), stages_of("run")[rollouts]["id"]
    wait_for(
        lambda: stages_of("run")[rollouts]["id"] != previous and stages_of("run")[rollouts]["state_type"] == "RUNNING",
        worker.log,
    )
    cancel(state())
    wait_for(lambda: state()["state_type"] == "CANCELLED", worker.log)
    wait_for(lambda: stages_of("run")[rollouts]["state_type"] in ("CANCELLED", "COMPLETED"), worker.log)
    # A stage that completed leaves the child with its model.
    kept = 1 if stages_of("run")[rollouts]["state_type"] == "COMPLETED" else 0
    wait_for(lambda: len(psutil.Process(worker.process.pid).children(recursive=True)) <= kept, worker.log)
    assert not [path for path in empty.path(".incoming").iterdir() if path.is_dir()]

    state = started(training)
    wait_for(lambda: state()["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), worker.log)
    assert state()["state_type"] == "COMPLETED", (state()["state"], worker.said)
    again, other = empty.start(), Runs(tmp_path / "other")
    assert again.stages == ()
    assert again.summary.policy_digest == other.start().summary.policy_digest
    assert joined_tables(empty) == joined_tables(other)
    requested = {"flow_runs": {"id": {"any_": [state()["id"]]}}, "limit": 100}
    found = httpx.post(f"{PREFECT_API_URL.value()}/task_runs/filter", json=requested, timeout=60).json()
    tasks = {each["name"] for each in found if not each["name"].endswith(" on only")}
    linked = {each["name"].removesuffix(" on only") for each in found if each["name"].endswith(" on only")}
    # What completed before is not done again.
    assert linked == tasks - ({"iteration 1: collect rollouts"} if kept else set())


def test_a_training_that_does_its_stages_itself_and_stages_of_others_take_turns(
    workers: Workers, empty: Runs, tmp_path: Path
) -> None:
    (worker,) = workers.start("turns")
    config = read_config(TINY, empty.overrides(run__name="itself"))
    state = started(asyncio.run(deploy_run(DeployRequest(pool="turns"), config)))
    wait_for(lambda: state()["state_type"] == "RUNNING", worker.log)
    other = Runs(tmp_path / "other")
    other.start(run__iterations=1, placement__advantages__pool="turns")
    begun = [number for number, line in enumerate(worker.said) if "compute advantages on turns: begun" in line]
    assert len(begun) == 1
    assert state()["state_type"] == "COMPLETED"
    (stage,) = [each for name, each in stages_of("run").items() if name.endswith("compute advantages on turns")]
    assert stage["start_time"] >= state()["end_time"]


def send(worker: Worker, number: int) -> None:
    """To the worker and what it started."""
    children = psutil.Process(worker.process.pid).children(recursive=True)
    for process in [psutil.Process(worker.process.pid), *children]:
        process.send_signal(number)


def test_a_frozen_worker_is_replaced_and_may_wake_up_later(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]], tmp_path: Path
) -> None:
    (frozen,) = workers.start("images")
    changes = {
        "rollout__prompts_per_batch": 1,
        "placement__rollouts__pool": "images",
        "placement__update__pool": "images",
        "placement__retries__delay": 0.1,
    }
    with training_process(empty, tmp_path / "run", **changes) as run:
        said = tmp_path / "run" / "err"
        try:
            frozen.wait_for(BEGUN)
            send(frozen, signal.SIGSTOP)
            wait_for(lambda: "of pool images has died" in said.read_text(), said)
            (other,) = workers.start("images")
            other.wait_for(BEGUN)
            send(frozen, signal.SIGCONT)
            assert run.wait(SECONDS_TO_START) == 0, said.read_text()
        finally:
            send(frozen, signal.SIGCONT)
    summary, runs = alone()
    assert printed_summary(tmp_path / "run")["policy_digest"] == summary.policy_digest
    assert joined_tables(empty) == joined_tables(runs)
    assert not empty.reasons()
    assert frozen.process.poll() is None, frozen.log.read_text()
    assert empty.start(rollout__prompts_per_batch=1).stages == ()
