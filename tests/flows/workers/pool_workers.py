"""Workers of pools as processes, and a server whose records are in PostgreSQL, for tests of placement."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.training.summary import TrainSummary
from tests.flows.conftest import Runs
from tests.flows.server.grpo_ui import grpo_ui
from tests.processes import wait_for
from tests.servers import postgres_server

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

        wait_for(has_said, SECONDS_TO_START, self.log.read_text)

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
