"""Two machines share an update, here two threads over a store of this one: what starts, ends and interrupts them."""

import gc
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from configs.placement import PlacementSection
from grpo_core.errors import InputError
from tasks.execution.child_process import ChildProcess
from tasks.execution.devices import DeviceProcess, DeviceProcesses
from tasks.execution.errors import LostStageError, RemoteStageError, StageCancelledError, record_of
from tasks.execution.fingerprint import library_versions
from tasks.execution.resources import resource, run_resources
from tasks.progress import listen
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, described, use_store
from tasks.storage.roots import StorageError
from tasks.update.job import SharedJob
from tasks.update.machines import MachineJob, Machines, Rendezvous, claim_rendezvous, first_machine
from tasks.update.process import UpdateGroup, take_part_in_updates
from tests.processes import ProgressLog
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of, largest_difference

ONE = PlacementSection(devices="cpu")


def torchrun(**changes: str) -> dict[str, str]:
    given = {"MASTER_ADDR": "first", "MASTER_PORT": "29400", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return given | {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"} | changes


SLURM = {"MASTER_ADDR": "first", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}


def test_variables_of_torchrun_are_taken() -> None:
    variables = torchrun(OTHER="kept")
    assert claim_rendezvous(variables) == Rendezvous(rank=1, count=2, host="first", port=29400)
    assert variables == {"OTHER": "kept", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    alone: list[dict[str, str]] = [{}, torchrun(WORLD_SIZE="1", RANK="0"), {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}]
    assert [claim_rendezvous(each) for each in alone] == [None] * 3


@pytest.mark.parametrize(
    ("variables", "place", "value"),
    [
        (torchrun(LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE", 4),
        (torchrun(TORCHELASTIC_USE_AGENT_STORE="False"), "MASTER_ADDR", "first"),
        ({"MASTER_ADDR": "first", "WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR", "first"),
        (SLURM, "MASTER_ADDR", "first"),
    ],
)
def test_other_launchers_are_refused_with_the_command(variables: dict[str, str], place: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        claim_rendezvous(variables)
    assert (caught.value.place, caught.value.value) == (place, value)
    assert place != "MASTER_ADDR" or "torchrun --nnodes" in caught.value.hint


@pytest.fixture
def places() -> tuple[Rendezvous, Rendezvous]:
    """Two machines, and the store of torchrun's agent, which both of them only reach."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.detach()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    _AGENTS.append(agent)
    return Rendezvous(0, 2, "127.0.0.1", port), Rendezvous(1, 2, "127.0.0.1", port)


_AGENTS: list[TCPStore] = []


def in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(call, *arguments)
    threads.shutdown(wait=False)
    return future


def shared_job(store: ArtifactStore, staged: Path, **placement: Any) -> SharedJob:
    rollouts = TEXTS.collect()
    job = job_of(TEXTS, rollouts, advantages_of(rollouts), update=UPDATE.model_copy(update={"epochs": 6}), **placement)
    return SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged))


def posted(store: ArtifactStore, tmp_path: Path) -> MachineJob:
    return MachineJob(first=(0, 1), count=2, group="group 1", shared=shared_job(store, tmp_path))


def test_a_job_and_how_it_ends(store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous]) -> None:
    job, (first, second) = posted(store, tmp_path), (Machines(place) for place in places)
    second.arrive(3)
    assert first.others() == {1: 3}
    number = first.post(job)
    assert second.next_job() == job.model_copy(update={"number": number})
    second.require_not_cancelled()
    second.finish(number, None)
    first.wait(number, 1)
    number = first.post(job)
    # What was said of the job before does not count.
    waiting = in_thread(first.wait, number, 1)
    second.finish(number, record_of(LostStageError("killed")))
    with pytest.raises(LostStageError, match="machine 1: killed"):
        waiting.result(30)
    assert second.next_job() == job.model_copy(update={"number": number})
    waiting = in_thread(first.wait, first.post(job), 1)
    cancelled = second.next_job()
    first.cancel(cancelled.number)
    # The store acknowledges no write: who wrote reads it first.
    with pytest.raises(StageCancelledError):
        waiting.result(30)
    with pytest.raises(StageCancelledError):
        second.require_not_cancelled()
    first.end(failed=False)
    assert second.next_job() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("policy.model", "m", "Copy it."), "machine 1: policy.model"),
        (StaleReferenceError("iteration_000001/rollouts: it has no manifest"), "machine 1: iteration_000001"),
        (StorageError("storage.root", "/runs", "the disk is full"), "machine 1: storage.root"),
        (KeyError("rows"), "machine 1: KeyError"),
        (LostStageError("process 2 of 2 ended by SIGKILL"), "machine 1: process 2"),
    ],
)
def test_an_error_of_a_machine_names_it(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous], error: Exception, said: str
) -> None:
    job, (first, second) = posted(store, tmp_path), (Machines(place) for place in places)
    second.arrive(1)
    first.others()
    number = first.post(job)
    second.next_job()
    second.finish(number, record_of(error))
    with pytest.raises(RemoteStageError if isinstance(error, KeyError) else type(error), match=f"^{said}"):
        first.wait(number, 1)


def test_restarted_machines_find_each_other(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous]
) -> None:
    job, (first, second) = posted(store, tmp_path), (Machines(place) for place in places)
    second.arrive(3)
    first.others()
    number = first.post(job)
    again = Machines(places[1])
    again.arrive(2)
    with pytest.raises(LostStageError, match="machine 1 was started again"):
        first.wait(number, 1)
    assert first.others() == {1: 2}
    number = first.post(job)
    found = again.next_job()
    assert found.number == number
    # The first machine too.
    later = Machines(places[0])
    assert later.others() == {1: 2}
    waiting = in_thread(again.next_job)
    number = later.post(job)
    found = waiting.result(30)
    assert found.number == number


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"code": "0" * 64}, "other code than the first"),
        ({"code": "0" * 64, "libraries": {"torch": "1.0"}}, f"torch {library_versions()['torch']} -> 1.0"),
        ({"settings": {"run": {"seed": 1}, "data": {"prompts": "b"}}}, "data.prompts a -> b; run.seed 0 -> 1."),
    ],
)
def test_a_machine_that_differs_is_named_with_what_differs(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous], changed: dict[str, Any], said: str
) -> None:
    settings = {"run": {"seed": 0}, "data": {"prompts": "a"}}
    second = Machines(places[1], settings)
    second._write("machine/1", second._own(1).model_copy(update=changed).model_dump_json())
    with pytest.raises(InputError) as caught, first_machine(places[0], settings):
        UpdateGroup().lead([], shared_job(store, tmp_path), lambda done, total: None)
    assert (caught.value.place, caught.value.value) == ("machine 1", socket.gethostname())
    assert said in caught.value.hint
    with pytest.raises(LostStageError, match="has failed"):
        second.next_job()


def test_a_machine_that_does_not_come_is_named(
    places: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.update.machines.SECONDS_TO_ARRIVE", 0.2)
    with pytest.raises(LostStageError, match=r"machine 1 has not arrived in 0\.2 s"):
        Machines(places[0]).others()


def test_the_others_end_where_torchrun_has_ended(places: tuple[Rendezvous, Rendezvous]) -> None:
    second = Machines(places[1])
    waiting = in_thread(second.next_job)
    _AGENTS.clear()
    gc.collect()
    with pytest.raises(LostStageError, match="store of torchrun"):
        waiting.result(30)


def test_a_failed_machine_waits_for_none(
    store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous]
) -> None:
    dies, shared = DeviceProcess(ChildProcess(("-c", "raise SystemExit(1)")), "cpu"), shared_job(store, tmp_path)
    with first_machine(places[0]):
        second = Machines(places[1])
        second.arrive(1)
        leading = in_thread(copy_context().run, UpdateGroup().lead, [dies], shared, lambda done, total: None)
        job = second.next_job()
        try:
            # The other one computes, and would wait for the one that is gone.
            with pytest.raises(LostStageError, match="ended with code 1"):
                leading.result(30)
            with pytest.raises(StageCancelledError):
                second.require_not_cancelled()
        finally:
            second.finish(job.number, None)


@pytest.mark.slow
def test_two_machines_after_a_kill(store: ArtifactStore, tmp_path: Path, places: tuple[Rendezvous, Rendezvous]) -> None:
    (tmp_path / "two").mkdir()
    shared = shared_job(store, tmp_path / "two")
    one = alone(shared.job, tmp_path / "one")
    killed = threading.Event()

    def follower() -> None:
        take_part_in_updates(Machines(places[1]), ONE)

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

    following, leading = in_thread(copy_context().run, follower), in_thread(copy_context().run, leader)
    outcome = leading.result(600)
    following.result(60)
    assert killed.is_set()
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-6
    assert outcome.rows == one.rows
