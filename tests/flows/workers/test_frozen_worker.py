"""A worker whose machine stands still, and goes on after its stage was sent to another: told, and no harm."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from flows.training.summary import TrainSummary
from tests.flows.conftest import REPOSITORY, Runs
from tests.flows.workers.pool_workers import SECONDS_TO_START, Worker, Workers, alone, joined_tables, server, workers

__all__ = ["alone", "server", "workers"]
BEGUN = "collect rollouts on images: begun"

pytestmark = pytest.mark.slow


def send(worker: Worker, number: int) -> None:
    """To the worker and what it started."""
    children = psutil.Process(worker.process.pid).children(recursive=True)
    for process in [psutil.Process(worker.process.pid), *children]:
        process.send_signal(number)


def wait_until(told: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not told():
        assert time.monotonic() - begun < SECONDS_TO_START
        time.sleep(0.05)


def test_a_frozen_worker_is_left_and_wakes_up_beside_the_one_that_took_its_stage(
    workers: Workers, empty: Runs, alone: Callable[..., tuple[TrainSummary, Runs]], tmp_path: Path
) -> None:
    (frozen,) = workers.start("images")
    changes = {
        "rollout__prompts_per_batch": 1,
        "placement__rollouts__pool": "images",
        "placement__update__pool": "images",
        "placement__retries__delay": 0.1,
    }
    overrides = [part for each in empty.overrides(run__name="run", **changes) for part in ("--set", each)]
    server = PREFECT_API_URL.value()
    assert server is not None
    command = [sys.executable, "-m", "flows.command_line.main", "train", "configs/tiny.yaml", *overrides, "--json"]
    environment = {**os.environ, "PREFECT_API_URL": server, "PREFECT_HOME": str(tmp_path / "home")}
    said = tmp_path / "err"
    with (tmp_path / "out").open("wb") as out, said.open("wb") as err:
        run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=out, stderr=err)
        try:
            frozen.wait_for(BEGUN)
            send(frozen, signal.SIGSTOP)
            wait_until(lambda: "of pool images has died" in said.read_text())
            (other,) = workers.start("images")
            other.wait_for(BEGUN)
            send(frozen, signal.SIGCONT)
            assert run.wait(SECONDS_TO_START) == 0, said.read_text()
        finally:
            run.kill()
            run.wait()
            send(frozen, signal.SIGCONT)
    told = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    summary, runs = alone()
    assert told["policy_digest"] == summary.policy_digest
    assert joined_tables(empty) == joined_tables(runs)
    assert not empty.reasons()
    assert frozen.process.poll() is None, frozen.log.read_text()
    # What the one that woke up has left for nobody is in nobody's way.
    assert empty.start(rollout__prompts_per_batch=1).stages == ()
