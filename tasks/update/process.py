"""Updates in several processes of this machine, which are started once and keep their model."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from configs.sections import PlacementSection
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess
from tasks.execution.errors import RemoteStageError
from tasks.execution.resources import resource
from tasks.models.resident import ResidentPolicy, configure_torch
from tasks.progress import Silence, listener
from tasks.storage.artifacts.store import ArtifactStore, described, open_store, use_store
from tasks.storage.roots import translate_storage_errors
from tasks.update.component import carry_out
from tasks.update.job import SharedJob, UpdateJob, UpdateOutcome, refuse_unusable_placement

SECONDS_TO_FIND_CAUSE = 5.0
_SECONDS_TO_END = 0.1
_ADDRESS = "127.0.0.1"


def carry_out_together(
    job: UpdateJob, store: ArtifactStore, staged: Path, on_progress: Callable[[int, int], None]
) -> UpdateOutcome:
    """Run `carry_out` in `job.placement.processes` processes, which the run keeps for its next updates.

    The policy that this process keeps is released first if it uses a GPU's memory.

    Args:
        store: of the artifacts; they are verified here once, before the processes read them.
        on_progress: called with the first process's passes done and the total.

    Raises:
        InputError: the machine cannot run it.
        ParityError, NonFiniteError, StaleReferenceError, StorageError, ValueError: as a process raised it.
        LostStageError: a process was killed, or ended without saying why.
        RemoteStageError: a process raised an error of another class.
    """
    refuse_unusable_placement(job.placement, job.updates)
    _verify(job, store)
    if job.placement.device != "cpu" and torch.cuda.is_available():
        resource(ResidentPolicy).close()
    shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged.resolve()))
    return resource(UpdateProcesses).carry_out(shared, on_progress)


def _verify(job: UpdateJob, store: ArtifactStore) -> None:
    """Read everything once, so that damaged files are quarantined here and not by several processes at once."""
    references = [*job.rollouts, job.advantages, *([job.policy.checkpoint] if job.policy.checkpoint else [])]
    with store.reading() as read:
        for reference in references:
            read(reference)


class _Progress(Silence):
    """Passes progress on, which the first process reports; every process would log the same lines."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress

    def advance(self, stage: str, done: int, total: int) -> None:
        """Report passes."""
        self._on_progress(done, total)


class UpdateProcesses:
    """The processes of a run's updates; a failure ends all of them, and the next update starts others."""

    def __init__(self) -> None:
        self._placement: PlacementSection | None = None
        self._processes: list[ChildProcess] = []
        self._store: TCPStore | None = None

    def carry_out(self, shared: SharedJob, on_progress: Callable[[int, int], None]) -> UpdateOutcome:
        """Hand the job to every process, and return the first one's outcome; raises what `carry_out_together` does."""
        processes = self._running(shared.job.placement)
        payload, reporter = shared.model_dump(mode="json"), _Progress(on_progress)
        with ThreadPoolExecutor(len(processes), thread_name_prefix="update") as threads:
            answers: list[Future[Any]] = [
                threads.submit(copy_context().run, process.request, "update policy", payload, None, reporter)
                for process in processes
            ]
            try:
                _require_success(answers)
            except BaseException:
                # Again for a process that is only being started: it would wait for the others.
                while wait(answers, _SECONDS_TO_END).not_done:
                    for process in processes:
                        process.end()
                self.close()
                raise
        return UpdateOutcome.model_validate_json(json.dumps(answers[0].result()))

    def _running(self, placement: PlacementSection) -> list[ChildProcess]:
        """Return the processes of this placement; they are started with their first request."""
        if placement == self._placement and all(process.is_running for process in self._processes):
            return self._processes
        self.close()
        # This process has the store in which they find each other; without a socket of ours it would listen on every
        # address of the machine.
        with socket.create_server((_ADDRESS, 0)) as listening:
            port, descriptor = listening.getsockname()[1], listening.detach()
        self._store = TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        variables = {
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(placement.processes),
            "LOCAL_WORLD_SIZE": str(placement.processes),
            "OMP_NUM_THREADS": str(placement.torch_threads),
            # The machine's host name may resolve to an unreachable address.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        self._placement = placement
        self._processes = [
            ChildProcess(child_command("update"), {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(placement.processes)
        ]
        return self._processes

    def close(self) -> None:
        """Kill every process."""
        for process in self._processes:
            process.end()
        self._processes, self._placement, self._store = [], None, None


def _require_success(answers: Sequence[Future[Any]]) -> None:
    """Wait until all have an outcome or one has failed, and raise what made it fail."""
    first = next((error for answer in as_completed(answers) if (error := answer.exception()) is not None), None)
    if first is None:
        return
    if isinstance(first, RemoteStageError):
        # When a process is killed, another may report first that it has lost the connection.
        wait(answers, SECONDS_TO_FIND_CAUSE)
    errors = [error for answer in answers if answer.done() and (error := answer.exception()) is not None]
    raise next((error for error in errors if not isinstance(error, RemoteStageError)), first)


def update_handler() -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return what takes part in one update after another; only the first process has an outcome."""

    def handle(payload: dict[str, Any]) -> dict[str, Any] | None:
        outcome = take_part(SharedJob.model_validate_json(json.dumps(payload)))
        return None if outcome is None else outcome.model_dump(mode="json")

    return handle


def take_part(shared: SharedJob) -> UpdateOutcome | None:
    """Join the other processes unless that is done, and run the update; every process has to call this.

    The policy stays in CPU memory for the next update. On a GPU its memory is needed for the next rollouts, and a
    sharded model cannot take other weights; there the next update loads the model again.

    Returns:
        What was written; None in every process but the first.

    Raises:
        Exception: any error of the update.
    """
    # Only such a process needs accelerate and FSDP, whose import takes half a second.
    from grpo_core.update.accelerated import AcceleratedProcessGroup, ShardedProcessGroup

    job = shared.job
    store = open_store(shared.storage, shared.run)
    use_store(store)
    is_sharded = job.placement.sharding == "fsdp2"
    process_group = (ShardedProcessGroup if is_sharded else AcceleratedProcessGroup)(configure_torch(job.placement))
    is_first = process_group.rank == 0

    def report(done: int, total: int) -> None:
        listener().advance("update policy", done, total)

    with translate_storage_errors(store.filesystem, store.root):
        outcome = carry_out(job, Path(shared.staged), process_group, report if is_first else None)
    resident = resource(ResidentPolicy)
    if is_sharded or process_group.device.type != "cpu":
        resident.close()
        return outcome
    digest = process_group.from_first(None if outcome is None else outcome.policy.digest)
    # The first process alone has refreshed the reference; the others read the new one when they need it.
    resident.commit_weights(digest, (job.policy if outcome is None else outcome.policy).copies.get("reference"))
    return outcome
