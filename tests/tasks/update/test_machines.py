"""Two machines share an update, here two threads over a port of this one: what starts, ends and interrupts them."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.sections import PlacementSection
from grpo_core.errors import InputError
from tasks.execution.child_process import ChildProcess
from tasks.execution.devices import DeviceProcess, DeviceProcesses
from tasks.execution.errors import LostStageError, StageCancelledError, record_of
from tasks.execution.resources import resource, run_resources
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore, described, use_store
from tasks.update.job import SharedJob
from tasks.update.machines import MachineJob, Machines, Rendezvous, claim_rendezvous, first_machine
from tasks.update.process import UpdateGroup, take_part_in_updates
from tests.processes import ProgressLog
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of, largest_difference

ONE = PlacementSection(devices="cpu")


def torchrun(**changes: str) -> dict[str, str]:
    given = {"MASTER_ADDR": "first", "MASTER_PORT": "29400", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return given | changes


SLURM = {"MASTER_ADDR": "first", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "OTHER": "kept"}


def test_variables_of_torchrun_and_slurm() -> None:
    variables = torchrun(LOCAL_WORLD_SIZE="1", OTHER="kept")
    assert claim_rendezvous(variables) == Rendezvous(rank=1, count=2, host="first", port=29400, serves=False)
    assert variables == {"OTHER": "kept"}
    assert claim_rendezvous(torchrun(RANK="0")) == Rendezvous(0, 2, "first", 29400, serves=True)
    agent = torchrun(RANK="0", TORCHELASTIC_USE_AGENT_STORE="True")
    assert claim_rendezvous(agent) == Rendezvous(0, 2, "first", 29400, serves=False)
    assert claim_rendezvous(dict(SLURM)) == Rendezvous(0, 3, "first", 29500, serves=True)
    alone: list[dict[str, str]] = [{}, torchrun(WORLD_SIZE="1", RANK="0"), {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}]
    assert [claim_rendezvous(each) for each in alone] == [None] * 3


@pytest.mark.parametrize(
    ("variables", "place", "value"),
    [
        (torchrun(RANK="2"), "RANK", 2),
        (torchrun(RANK="first"), "RANK", "first"),
        ({"MASTER_ADDR": "first", "WORLD_SIZE": "2"}, "RANK", None),
        (torchrun(MASTER_PORT="http"), "MASTER_PORT", "http"),
        (torchrun(LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE", 4),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "8"}, "SLURM_NTASKS_PER_NODE", 8),
    ],
)
def test_variables_that_are_refused(variables: dict[str, str], place: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        claim_rendezvous(variables)
    assert (caught.value.place, caught.value.value) == (place, value)


@pytest.fixture
def places() -> tuple[Rendezvous, Rendezvous]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Rendezvous(0, 2, "127.0.0.1", port, serves=True), Rendezvous(1, 2, "127.0.0.1", port, serves=False)


def shared_job(store: ArtifactStore, staged: Path, **placement: Any) -> SharedJob:
    rollouts = TEXTS.collect()
    job = job_of(TEXTS, rollouts, advantages_of(rollouts), update=UPDATE.model_copy(update={"epochs": 6}), **placement)
    return SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged))


def posted(store: ArtifactStore, tmp_path: Path) -> MachineJob:
    return MachineJob(first=(0, 1), count=2, group="group 1", shared=shared_job(store, tmp_path))


def test_a_job_and_how_it_ends(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = posted(store, tmp_path)
    with ThreadPoolExecutor(1) as threads, Machines(places[0]) as first:
        waiting = threads.submit(first.others)
        with Machines(places[1]) as second:
            second.arrive(3)
            assert waiting.result(30) == {1: 3}
            number = first.post(job)
            assert second.next_job() == job
            second.require_not_cancelled()
            second.finish(number, None)
            first.wait(number, 1)
            assert second.finish(first.post(job), record_of(LostStageError("killed"))) is None
            with pytest.raises(LostStageError, match="machine 1: killed"):
                first.wait(2, 1)
            assert second.next_job() == job
            first.cancel(2)
            with pytest.raises(StageCancelledError):
                second.require_not_cancelled()
            monkeypatch.setattr("tasks.update.machines.SECONDS_WITHOUT_BEAT", -1.0)
            with pytest.raises(LostStageError, match="machine 1 has not answered"):
                first.wait(first.post(job), 1)
            monkeypatch.undo()
            ended = threads.submit(lambda: [second.next_job(), second.next_job()])
            first.__exit__(None, None, None)
            assert ended.result(30) == [job, None]


def test_other_code_is_refused(places: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as threads, Machines(places[0]) as first, Machines(places[1]) as second:
        monkeypatch.setattr("tasks.update.machines.code_of", lambda roots: "0" * 64)
        second.arrive(1)
        monkeypatch.undo()
        waiting = threads.submit(second.next_job)
        with pytest.raises(InputError) as caught:
            first.others()
        assert caught.value.place == "machine 1"
        first.__exit__(type(caught.value), caught.value, None)
        with pytest.raises(LostStageError, match="has failed"):
            waiting.result(30)


def test_a_machine_that_fails_waits_for_no_other(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.update.machines.SECONDS_TO_LEAVE", 0.1)
    dies, shared = DeviceProcess(ChildProcess(("-c", "raise SystemExit(1)")), "cpu"), shared_job(store, tmp_path)
    with ThreadPoolExecutor(1) as threads, first_machine(places[0]), Machines(places[1]) as second:
        second.arrive(1)
        leading = threads.submit(copy_context().run, UpdateGroup().lead, [dies], shared, lambda done, total: None)
        assert second.next_job() is not None
        try:
            # The other one computes, and would wait for the one that is gone.
            with pytest.raises(LostStageError, match="ended with code 1"):
                leading.result(30)
            with pytest.raises(StageCancelledError):
                second.require_not_cancelled()
        finally:
            second.finish(1, None)


@pytest.fixture
def in_context() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.slow
def test_two_machines_compute_the_weights_of_one_also_after_a_kill(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous], in_context: ThreadPoolExecutor
) -> None:
    (tmp_path / "two").mkdir()
    shared = shared_job(store, tmp_path / "two")
    one = alone(shared.job, tmp_path / "one")
    killed = threading.Event()

    def follower() -> None:
        with Machines(places[1]) as machines:
            take_part_in_updates(machines, ONE)

    def kill() -> None:
        children = [each for each in psutil.Process().children() if each.cmdline()[-1:] == ["device"]]
        max(children, key=lambda each: each.create_time()).kill()
        killed.set()

    def leader() -> Any:
        use_store(store)
        log = ProgressLog(kill)
        listen(log)
        with first_machine(places[0]), run_resources(), resource(DeviceProcesses).borrow_all(ONE) as devices:
            group = UpdateGroup()
            with pytest.raises(LostStageError, match="ended by SIGKILL"):
                group.lead(devices, shared, lambda done, total: log.advance("update", done, total))
            return group.lead(devices, shared, lambda done, total: None)

    futures: list[Future[Any]] = [in_context.submit(copy_context().run, each) for each in (follower, leader)]
    outcome = futures[1].result(600)
    futures[0].result(60)
    assert killed.is_set()
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-6
    assert outcome.rows == one.rows
