"""Updates in the processes of the devices, which compute a part of every minibatch each."""

import json
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from configs.placement import PlacementSection
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
from tasks.execution.call import naming_timeout, stage_handler
from tasks.execution.devices import DeviceProcess, DeviceProcesses
from tasks.execution.errors import LostStageError, RemoteStageError, record_of
from tasks.execution.resources import resource, run_resources
from tasks.models.devices import configure_torch, refuse_missing_devices
from tasks.models.resident import ResidentPolicy
from tasks.progress import ProgressReporter, Silence, listener, log
from tasks.runs.stored_streams import STORED_STREAMS
from tasks.storage.artifacts.store import ArtifactStore, described, open_store, use_store
from tasks.storage.roots import translate_storage_errors
from tasks.update.component import carry_out
from tasks.update.job import Member, SharedJob, UpdateJob, UpdateOutcome, refuse_unusable_placement
from tasks.update.machines import MachineJob, Machines, Rendezvous, machine_count, other_machines

SECONDS_TO_FIND_CAUSE = 5.0
_SECONDS_TO_END = 0.1
_SECONDS_BETWEEN_CHECKS = 0.5
_ADDRESS = "127.0.0.1"


def carry_out_together(
    job: UpdateJob, store: ArtifactStore, staged: Path, on_progress: Callable[[int, int], None]
) -> UpdateOutcome:
    """Run `carry_out` in the processes of all devices.

    The policy that this process keeps is released first if it uses a GPU's memory. The artifacts are verified here
    once, before the processes read them. `on_progress` is called with the first process's passes done and the total.

    Raises:
        InputError: the machine cannot run it.
        ParityError, NonFiniteError, StaleReferenceError, StorageError, ValueError, OutOfMemoryError: as in a process.
        LostStageError: a process was killed, or ended without saying why.
        StageTimeoutError: it took longer than `placement.update.timeout`.
        RemoteStageError: a process raised an error of another class.
    """
    refuse_unusable_placement(job.placement, job.updates, machine_count())
    _verify(job, store)
    if torch.cuda.is_initialized():
        resource(ResidentPolicy).close()
    shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged.resolve()))
    with resource(DeviceProcesses).borrow_all(job.placement) as devices, naming_timeout("update policy", {}):
        return resource(UpdateGroup).lead(devices, shared, on_progress)


def _verify(job: UpdateJob, store: ArtifactStore) -> None:
    """Read what is needed once, so that damaged files are quarantined here and not by several processes at once."""
    references = [*job.rollouts, job.advantages, *([job.policy.checkpoint] if job.policy.checkpoint else [])]
    # Not the images, which no update reads.
    unread = set[str].intersection(*(set(STORED_STREAMS[stream].unread) for stream in job.updates))
    with store.reading(without=tuple(unread)) as read:
        for reference in references:
            read(reference)


class _Progress(Silence):
    """Passes progress on, which the first process reports; every process would log the same lines."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress

    def advance(self, stage: str, done: int, total: int) -> None:
        """Report passes."""
        self._on_progress(done, total)


class UpdateGroup:
    """The group of all devices' processes from the first update until one ends; a failed update ends all."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._starts: tuple[int, ...] = ()
        self._port = 0
        self._store: TCPStore | None = None

    def lead(
        self, devices: Sequence[DeviceProcess], shared: SharedJob, on_progress: Callable[[int, int], None]
    ) -> UpdateOutcome:
        """Hand the job to every process, and return the first one's outcome; raises what `carry_out_together` does."""
        machines = other_machines()
        others = {} if machines is None else machines.others()
        if not self._is_complete(devices):
            self._leave(devices)
            # torchrun's store outlives this process.
            self._name = f"group {uuid.uuid4().hex}"
            if machines is None:
                self._open_store()
        assert self._name is not None, "the group has been named"
        first = [len(devices)]
        for count in others.values():
            first.append(first[-1] + count)
        job = MachineJob(first=(0, *first[:-1]), count=first[-1], group=self._name, shared=shared)
        number = 0 if machines is None else machines.post(job)
        outcome = self._together(
            devices,
            job,
            place=None if machines is None else machines.rendezvous,
            reporter=_Progress(on_progress),
            others=[] if machines is None else [partial(machines.wait, number, rank) for rank in others],
            cancel=(lambda: None) if machines is None else partial(machines.cancel, number),
        )
        return UpdateOutcome.model_validate_json(json.dumps(outcome))

    def follow(self, devices: Sequence[DeviceProcess], job: MachineJob, machines: Machines) -> None:
        """Take part in a job of the first machine; raises what `lead` does, and StageCancelledError."""
        if job.group != self._name:
            self._leave(devices)
            self._name = job.group
        elif not self._is_complete(devices):
            self._leave(devices)
            raise LostStageError("a process of this machine has ended since the last update")
        self._together(
            devices, job, place=machines.rendezvous, reporter=Silence(), check=machines.require_not_cancelled
        )

    def _together(
        self,
        devices: Sequence[DeviceProcess],
        job: MachineJob,
        *,
        place: Rendezvous | None,
        reporter: ProgressReporter,
        others: Sequence[Callable[[], object]] = (),
        check: Callable[[], object] = lambda: None,
        cancel: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run the job in these processes and return the first one's answer; if it fails, `cancel` ends other machines'
        part.
        """
        first = 0 if place is None else job.first[place.rank]
        host, port = (_ADDRESS, self._port) if place is None else (place.host, place.port)
        with ThreadPoolExecutor(len(devices) + len(others), thread_name_prefix="update") as threads:
            answers: list[Future[Any]] = []
            for rank, device in enumerate(devices, start=first):
                member = Member(rank=rank, count=job.count, host=host, port=port, group=job.group)
                answers.append(threads.submit(copy_context().run, _request, device, member, job.shared, reporter))
            elsewhere = [threads.submit(other) for other in others]
            try:
                _require_success([*answers, *elsewhere], check)
            except BaseException:
                cancel()
                # Again for a process that is only being started: it would wait for the others.
                while job.count > 1 and wait(answers, _SECONDS_TO_END).not_done:
                    _end(devices)
                if job.count > 1:
                    self._leave(devices)
                raise
        self._starts = tuple(device.process.starts for device in devices)
        return answers[0].result()

    def _is_complete(self, devices: Sequence[DeviceProcess]) -> bool:
        alive = all(device.process.is_running for device in devices)
        return alive and self._starts == tuple(device.process.starts for device in devices)

    def _open_store(self) -> None:
        """Open a store in which the processes of this machine find each other; several machines share torchrun's."""
        # Without a socket of ours it would listen on every address of the machine.
        with socket.create_server((_ADDRESS, 0)) as listening:
            self._port, descriptor = listening.getsockname()[1], listening.detach()
        self._store = TCPStore(
            _ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )

    def _leave(self, devices: Sequence[DeviceProcess]) -> None:
        """Forget the group, and end its processes: each is in one group as long as it lives."""
        if self._name is not None:
            _end(devices)
        self._name, self._starts, self._store = None, (), None


def _request(device: DeviceProcess, member: Member, shared: SharedJob, reporter: ProgressReporter) -> Any:
    job = shared.job.model_copy(update={"placement": shared.job.placement.on(device.device)})
    own = shared.model_copy(update={"job": job, "member": member if member.count > 1 else None})
    payload = {"update": own.model_dump(mode="json")}
    return device.process.request("update policy", payload, shared.job.placement.update.timeout, reporter)


def take_part_in_updates(machines: Machines, placement: PlacementSection) -> None:
    """Take part in the updates of the first machine until they end; LostStageError if the training has failed."""
    refuse_missing_devices(placement.devices)
    group = UpdateGroup()
    with run_resources():
        machines.arrive(len(placement.devices))
        log(f"machine {machines.rendezvous.rank} of {machines.rendezvous.count} takes part in the updates")
        while (job := machines.next_job()) is not None:
            failure = None
            try:
                with resource(DeviceProcesses).borrow_all(placement) as devices:
                    group.follow(devices, job, machines)
            except Exception as error:
                log(f"update of version {job.shared.job.version}: {error}")
                failure = record_of(error)
            machines.finish(job.number, failure)


def _end(devices: Sequence[DeviceProcess]) -> None:
    for device in devices:
        device.process.end()


def _require_success(answers: Sequence[Future[Any]], check: Callable[[], object]) -> None:
    """Wait until all have an outcome or one has failed, and raise what made it fail, or what `check` raises."""
    waiting = set(answers)
    while waiting and not (failed := _errors(answers)):
        waiting = wait(waiting, _SECONDS_BETWEEN_CHECKS, FIRST_COMPLETED).not_done
        check()
    if not (failed := _errors(answers)):
        return
    if _lost_the_others(failed[0]):
        wait(answers, SECONDS_TO_FIND_CAUSE)
        failed = _errors(answers)
    raise next((error for error in failed if not _lost_the_others(error)), failed[0])


def _lost_the_others(error: BaseException) -> bool:
    """Return whether a process may have failed because another one did, and have told it first.

    Over gloo it raises an error that cannot be rebuilt here, and the watchdog of NCCL aborts it.
    """
    return isinstance(error, RemoteStageError) or (isinstance(error, LostStageError) and "by SIGABRT" in str(error))


def _errors(answers: Sequence[Future[Any]]) -> list[BaseException]:
    return [error for answer in answers if answer.done() and (error := answer.exception()) is not None]


def device_handler() -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return what runs a device's stages and updates; only the first process has the outcome of an update."""
    stage = stage_handler()

    def handle(payload: dict[str, Any]) -> dict[str, Any] | None:
        if "update" not in payload:
            return stage(payload)
        outcome = take_part(SharedJob.model_validate_json(json.dumps(payload["update"])))
        return None if outcome is None else outcome.model_dump(mode="json")

    return handle


def take_part(shared: SharedJob) -> UpdateOutcome | None:
    """Join the other processes unless that is done, and run the update; every process has to call this.

    The policy stays in memory, for the next rollouts or update. One that is sharded cannot take other weights, and is
    loaded again. Only the first process returns what was written.
    """
    job = shared.job
    store = open_store(shared.storage, shared.run)
    use_store(store)
    process_group = _joined(shared)
    is_first = process_group.rank == 0

    def report(done: int, total: int) -> None:
        listener().advance("update policy", done, total)

    with translate_storage_errors(store.filesystem, store.root):
        outcome = carry_out(job, Path(shared.staged), process_group, report if is_first else None)
    resident = resource(ResidentPolicy)
    if job.placement.sharding == "fsdp2":
        resident.close()
        return outcome
    digest = process_group.from_first(None if outcome is None else outcome.policy.digest)
    # The first process alone has refreshed the reference; the others read the new one when they need it.
    resident.commit_weights(digest, (job.policy if outcome is None else outcome.policy).copies.get("reference"))
    return outcome


def _joined(shared: SharedJob) -> ProcessGroup:
    """Return the group of the update's processes, which finds this process on its first update."""
    device, member = configure_torch(shared.job.placement), shared.member
    if member is None:
        return SINGLE_PROCESS
    # Only several processes need FSDP, whose import takes half a second.
    from grpo_core.update.distributed import DistributedProcessGroup, ShardedProcessGroup, join

    if not dist.is_initialized():
        if member.host in (_ADDRESS, "localhost"):
            # The machine's host name may resolve to an unreachable address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found = TCPStore(member.host, member.port, is_master=False)
        join(PrefixStore(member.group, found), member.rank, member.count, device)
    is_sharded = shared.job.placement.sharding == "fsdp2"
    return (ShardedProcessGroup if is_sharded else DistributedProcessGroup)(device)
