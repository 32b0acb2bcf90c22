"""Stages on work pools: the same run as in one process, the model loaded once a worker, and a worker that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from flows.summary import TrainSummary

from .conftest import REPOSITORY, Runs

SECONDS_TO_START = 240.0
POOLED: dict[str, object] = {
    "rollout__prompts_per_batch": 1,
    "placement__rollouts__pool": "pictures",
    "placement__rollouts__shards": 2,
    "placement__rewards__pool": "scores",
    "placement__rewards__shards": 2,
    "placement__advantages__pool": "scores",
    "placement__update__pool": "pictures",
    "placement__retries__delay": 0.1,
}

pytestmark = pytest.mark.slow


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
        limit = time.monotonic() + SECONDS_TO_START
        while not any(text in line for line in self.said):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.05)

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
            command = [sys.executable, "-m", "flows.command_line", "worker", pool]
            with log.open("wb") as stream:
                process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=stream, stderr=stream)
            begun.append(Worker(pool, log, process))
            self.all.append(begun[-1])
        for worker in begun:
            worker.wait_for("started!")
        return begun


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
    left = [process for process in psutil.process_iter(["cmdline"]) if "tasks.placing.process" in process.cmdline()]
    assert not [process for process in left if process.ppid() == 1], "a worker left its child behind"


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


def test_pools_and_shards_give_the_run_of_one_process(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]]
) -> None:
    first, second, scores = workers.start("pictures", "pictures", "scores")
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
    # Where stages are done is no part of what they are.
    assert empty.start(rollout__prompts_per_batch=1).stages == ()


def test_a_worker_killed_in_its_stage_and_another_takes_it(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]], tmp_path: Path
) -> None:
    (first,) = workers.start("pictures")
    changes = {key: value for key, value in POOLED.items() if "rewards" not in key and "advantages" not in key}
    overrides = [part for each in empty.overrides(run__name="run", **changes) for part in ("--set", each)]
    server = PREFECT_API_URL.value()
    assert server is not None
    command = [sys.executable, "-m", "flows.command_line", "train", "configs/tiny.yaml", *overrides, "--json"]
    environment = {**os.environ, "PREFECT_API_URL": server, "PREFECT_HOME": str(tmp_path / "home")}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=out, stderr=err)
        try:
            first.wait_for("iteration 1, shard 1 of 2: collect rollouts: begun")
            first.kill()
            workers.start("pictures")
            assert run.wait(SECONDS_TO_START) == 0, (tmp_path / "err").read_text()
        finally:
            run.kill()
            run.wait()
    told = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    other, runs = alone()
    assert told["policy_digest"] == other.policy_digest
    assert joined_tables(empty) == joined_tables(runs)
    said = (tmp_path / "err").read_text()
    assert "of pool pictures is gone" in said
    assert "try 2 of 3 follows" in said


def test_rollouts_ahead_of_the_updates(workers: Workers, empty: Runs) -> None:
    workers.start("pictures")
    settings: dict[str, object] = {"run__iterations": 4, "run__staleness": 1}
    pooled = empty.start(**settings, placement__rollouts__pool="pictures").summary
    versions = [
        set(pl.read_parquet(empty.path(f"iteration_{number:06d}", "rollouts", "*.parquet"))["policy_version"])
        for number in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {0}, {1}, {2}]
    here = Runs(empty.root.parent / "here")
    assert here.start(**settings).summary.policy_digest == pooled.policy_digest


@pytest.mark.parametrize("shards", [1, 2])
def test_an_interrupt_ends_a_run_that_waits_and_cancels_what_it_asked_for(
    workers: Workers, empty: Runs, tmp_path: Path, shards: int
) -> None:
    # The pool is there and nobody serves it.
    (worker,) = workers.start("deserted")
    worker.kill()
    changes = {"rollout__prompts_per_batch": 1, "placement__rollouts__shards": shards}
    placed = empty.overrides(run__name="run", placement__rollouts__pool="deserted", **changes)
    server = PREFECT_API_URL.value()
    assert server is not None
    command = [sys.executable, "-m", "flows.command_line", "train", "configs/tiny.yaml"]
    command += [part for each in placed for part in ("--set", each)]
    environment = {**os.environ, "PREFECT_API_URL": server, "PREFECT_HOME": str(tmp_path / "home")}
    with (tmp_path / "err").open("wb") as err:
        run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=err, stdout=err)
        try:
            limit = time.monotonic() + SECONDS_TO_START
            while (tmp_path / "err").read_text().count("sent to pool deserted") < shards:
                assert time.monotonic() < limit, (tmp_path / "err").read_text()
                time.sleep(0.1)
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 1
        finally:
            run.kill()
            run.wait()
    asked = {"deployments": {"name": {"any_": ["deserted"]}}}
    runs = httpx.post(f"{server}/flow_runs/filter", json=asked).json()
    states = [each["state_type"] for each in sorted(runs, key=lambda each: each["created"])[-shards:]]
    assert set(states) <= {"CANCELLING", "CANCELLED"}
