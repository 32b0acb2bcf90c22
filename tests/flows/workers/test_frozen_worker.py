"""A worker whose machine freezes, and continues after its stage was sent to another, does no harm."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.training.summary import TrainSummary
from tests.flows.conftest import Runs, printed_summary, training_process
from tests.flows.workers.pool_workers import SECONDS_TO_START, Worker, Workers, alone, joined_tables, server, workers

__all__ = ["alone", "server", "workers"]
BEGUN = "collect rollouts on images: begun"

pytestmark = pytest.mark.slow


def send(worker: Worker, number: int) -> None:
    """To the worker and what it started."""
    children = psutil.Process(worker.process.pid).children(recursive=True)
    for process in [psutil.Process(worker.process.pid), *children]:
        process.send_signal(number)


def wait_until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < SECONDS_TO_START
        time.sleep(0.05)


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
            wait_until(lambda: "of pool images has died" in said.read_text())
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
