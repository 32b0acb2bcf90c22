"""Run an update in several processes of this machine, started by accelerate."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tasks.execution.child_process import ChildProcess, exit_code
from tasks.execution.errors import ErrorRecord, LostStageError
from tasks.execution.resources import resource
from tasks.models.resident import ResidentPolicy
from tasks.storage.artifacts.store import ArtifactStore, described
from tasks.update.job import SharedJob, UpdateJob, UpdateOutcome, refuse_unusable_placement
from tasks.update.process import JOB_FILE

SECONDS_TO_END = 30.0
_SETTINGS_FILE = "accelerate.json"


def carry_out_together(
    job: UpdateJob, store: ArtifactStore, staged: Path, on_progress: Callable[[int, int], None]
) -> UpdateOutcome:
    """Run `carry_out` in `job.placement.processes` processes.

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
    refuse_unusable_placement(job.placement, job.update)
    _verify(job, store)
    if job.placement.device != "cpu" and torch.cuda.is_available():
        resource(ResidentPolicy).close()
    with tempfile.TemporaryDirectory(prefix="grpo-update-") as scratch:
        folder = Path(scratch)
        shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged.resolve()))
        (folder / JOB_FILE).write_text(shared.model_dump_json())
        (folder / _SETTINGS_FILE).write_text(json.dumps(_launcher_settings(job)))
        launcher = _Launcher(folder, job)
        try:
            # The job is in the folder, since only one of several processes would read it from their common input.
            outcome = launcher.request("update policy", {}, None, _Progress(on_progress))
        finally:
            launcher.end()
    return UpdateOutcome.model_validate_json(json.dumps(outcome))


def _verify(job: UpdateJob, store: ArtifactStore) -> None:
    """Read everything once, so that damaged files are quarantined here and not by several processes at once."""
    references = [*job.rollouts, job.advantages, *([job.policy.checkpoint] if job.policy.checkpoint else [])]
    with tempfile.TemporaryDirectory() as fetched:
        for number, reference in enumerate(references):
            store.local_files(reference, Path(fetched) / str(number))


class _Progress:
    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress

    def advance(self, stage: str, done: int, total: int) -> None:
        """Report passes."""
        self._on_progress(done, total)

    def log(self, line: str) -> None:
        """Drop the line: every process would log the same."""


class _Launcher(ChildProcess):
    """accelerate's launcher and the processes that it starts; they share its input and output."""

    def __init__(self, folder: Path, job: UpdateJob) -> None:
        launch = ("-m", "accelerate.commands.launch", "--config_file", str(folder / _SETTINGS_FILE))
        variables = {
            "OMP_NUM_THREADS": str(job.placement.torch_threads),
            # The machine's host name may resolve to an unreachable address.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        super().__init__((*launch, "-m", "tasks.update.process", str(folder)), variables)

    def failure(self, record: ErrorRecord) -> Exception:
        """Find the cause: when a process is killed, the others fail first, with a lost connection."""
        if record.is_foreseen:
            return record.error()
        child, deadline = self._child, time.monotonic() + SECONDS_TO_END
        while child is not None and exit_code(child) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        loss = self.loss()
        return loss if self._killed(loss) else record.error()

    def loss(self) -> Exception:
        """Name the signal that killed a process, as torch's report at the end of the standard error has it."""
        loss = super().loss()
        killed = self._killed(loss)
        if killed is None:
            return loss
        cause = f"a process of the update was killed from outside by {killed}; the machine's memory may have run out"
        return LostStageError(f"{cause}\n{loss}")

    @staticmethod
    def _killed(loss: Exception) -> str | None:
        # The launcher ends the other processes by a signal too; it reports the first one to fail last.
        found = re.search(r"Signal \d+ \((\w+)\) received by PID \d+", str(loss).rpartition("Root Cause")[2])
        return found and found[1]


def _launcher_settings(job: UpdateJob) -> dict[str, object]:
    """Return accelerate's settings, which replace those that the user may have stored for this machine."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        # On the CPU accelerate would start several processes through MPI; its launcher for GPUs uses torch's
        # rendezvous, which works on any device.
        "distributed_type": "MULTI_GPU",
        "num_processes": job.placement.processes,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1",
        "main_process_port": 0,  # a free one
        "gpu_ids": "all",
        "mixed_precision": "no",  # the policy does its own autocast
        "use_cpu": False,
        "debug": False,
    }
