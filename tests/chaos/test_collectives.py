"""SIGKILL of one process of four before each kind of collective of an update, and inside: named, and made up for."""

import os
import random
import time
from pathlib import Path

import pytest

from tasks.execution.child_main import child_command
from tasks.execution.devices import DeviceProcesses
from tasks.execution.errors import LostStageError
from tasks.execution.resources import resource, run_resources
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.update.job import UpdateJob
from tests.chaos.collectives import HANDLER, ORDERS, Death, Orders
from tests.chaos.operations import Operation
from tests.processes import ProgressLog
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, committed, job_of

pytestmark = pytest.mark.chaos
SEED = int(os.environ.get("CHAOS_SEED", "0"))
ONLY = os.environ.get("CHAOS_COLLECTIVE", "")
PROCESSES, VICTIM = 4, 2
MAX_SECONDS = 30.0
BEGUN = "init_process_group: distributed.py:join < process.py:_joined"


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_killed_at_every_collective(sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, rng = Orders(tmp_path / "orders"), random.Random(SEED)
    monkeypatch.setenv(ORDERS, str(orders.file))
    monkeypatch.setattr("tasks.execution.devices.child_command", lambda handler: child_command(HANDLER))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(PROCESSES)))
    store = ArtifactStore(str(tmp_path / "runs"), "run")
    use_store(store)
    listen(ProgressLog())
    with run_resources():
        rollouts = TEXTS.collect()
        update = UPDATE.model_copy(update={"epochs": 1, "minibatch_size": 8})
        devices = ("cpu",) * PROCESSES
        job = job_of(TEXTS, rollouts, advantages_of(rollouts), update=update, devices=devices, sharding=sharding)
        undisturbed = committed(job)
        collectives = dict(orders.census())
        assert BEGUN in collectives
        for name, count in collectives.items():
            for inside in (False, True) if ONLY in name else ():
                store.clear_place("policies/000001", reason="it is made again")
                if name == BEGUN:
                    resource(DeviceProcesses).close()
                orders.give(Death(VICTIM, Operation(name, rng.randint(1, count)), inside))
                begun = time.monotonic()
                told = killed(job)
                seconds = time.monotonic() - begun
                print(f"{sharding} | {name} | {count} | {'inside' if inside else 'before'} | {seconds:.1f}", flush=True)
                assert seconds < MAX_SECONDS
                if told is not None:
                    assert f"process {VICTIM + 1} of {PROCESSES} ended by SIGKILL" in told
                    assert store.find("policies/000001") is None
                else:
                    assert inside, "it was to die before, and the others went on without it"
                    store.clear_place("policies/000001", reason="it is made again")
                orders.give(None)
                again = committed(job)
                assert (again.digest, again.checkpoint.digest) == (undisturbed.digest, undisturbed.checkpoint.digest)


def killed(job: UpdateJob) -> str | None:
    """How the update failed; None if all were through the collective before the process in it was killed."""
    try:
        committed(job)
    except LostStageError as error:
        return str(error)
    return None
