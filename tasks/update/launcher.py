"""Starts the processes that share an update, listens to them, and ends with them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tasks.checkout import environment
from tasks.execution.error_records import ErrorRecord
from tasks.execution.faults import LostStageError
from tasks.models.resident import release_policy
from tasks.storage.artifacts.open_store import described
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.job import SharedJob, UpdateJob, UpdateOutcome, refuse_unusable_placement
from tasks.update.process import JOB_FILE, OUTCOME_FILE, PROGRESS

ERROR_OUTPUT = "stderr.txt"
STDERR_TAIL_LINES = 30
SECONDS_TO_END = 30.0


class UpdateProcessError(RuntimeError):
    """A process of the update ended without saying why, or with an error that is no message for people."""


class LostUpdateProcessError(UpdateProcessError, LostStageError):
    """A process of the update was ended from outside, which may not come again."""


def carry_out_together(
    job: UpdateJob, store: ArtifactStore, staged: Path, on_progress: Callable[[int, int], None]
) -> UpdateOutcome:
    """`carry_out` in `job.placement.processes` processes that accelerate starts on this machine.

    The model that this process holds is released first where its memory is a GPU's.

    Args:
        job: what is to be done.
        store: of the artifacts; they are verified here once before the processes read them.
        staged: folder for the next version's files.
        on_progress: called with the first process's passes done and in all.

    Raises:
        InputError: the machine cannot do it.
        ParityError, NonFiniteError, StaleReferenceError, StorageError, ValueError: as a process raised it.
        LostUpdateProcessError: a process was killed.
        UpdateProcessError: a process failed otherwise; holds the end of what they said.
    """
    refuse_unusable_placement(job.placement, job.update)
    _verify(job, store)
    if job.placement.device != "cpu" and torch.cuda.is_available():
        release_policy()
    with tempfile.TemporaryDirectory(prefix="grpo-update-") as scratch:
        folder = Path(scratch)
        shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(staged.resolve()))
        (folder / JOB_FILE).write_text(shared.model_dump_json())
        with _launched(folder, job) as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                if line.startswith(f'{{"{PROGRESS}"'):
                    on_progress(*json.loads(line)[PROGRESS])
            code = launcher.wait()
        if code != 0 or not (folder / OUTCOME_FILE).exists():
            raise _failure(folder, code)
        return UpdateOutcome.model_validate_json((folder / OUTCOME_FILE).read_text())


def _verify(job: UpdateJob, store: ArtifactStore) -> None:
    """What is damaged is set aside here, once; several processes would take it from each other."""
    references = [*job.rollouts, job.advantages, *([job.policy.checkpoint] if job.policy.checkpoint else [])]
    with tempfile.TemporaryDirectory() as fetched:
        for number, reference in enumerate(references):
            store.local_files(reference, Path(fetched) / str(number))


@contextlib.contextmanager
def _launched(folder: Path, job: UpdateJob) -> Iterator[subprocess.Popen[str]]:
    """The launcher of accelerate with its processes; none of them is left afterwards."""
    (folder / "accelerate.json").write_text(json.dumps(_launcher_settings(job)))
    command = ["accelerate.commands.launch", "--config_file", str(folder / "accelerate.json")]
    command += ["-m", "tasks.update.process", str(folder)]
    with (folder / ERROR_OUTPUT).open("wb") as errors:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(job),
            # An interrupt in the terminal is for this process, which ends the others.
            start_new_session=True,
            text=True,
        )
    try:
        yield launcher
    finally:
        _end(launcher)


def _launcher_settings(job: UpdateJob) -> dict[str, object]:
    """In the place of the defaults that a person may have set for this machine."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        # For accelerate several processes on the CPU are MPI's; its launcher for GPUs starts any that find each other
        # through torch's own rendezvous.
        "distributed_type": "MULTI_GPU",
        "num_processes": job.placement.processes,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1",
        "main_process_port": 0,  # a free one
        "gpu_ids": "all",
        "mixed_precision": "no",  # the policy has its own
        "use_cpu": False,
        "debug": False,
    }


def _environment(job: UpdateJob) -> dict[str, str]:
    return environment(
        OMP_NUM_THREADS=str(job.placement.torch_threads),
        # One machine: the host's name may stand for an address that is not reached.
        GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    )


def _end(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    launcher.stdin.close()  # the processes end with it
    if launcher.poll() is None:
        launcher.terminate()
    try:
        launcher.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    launcher.stdout.close()


def _failure(folder: Path, code: int) -> Exception:
    """The first error that is one for people; else the first one, with the end of what the processes said."""
    files = sorted(folder.glob("error-*.json"))
    records = sorted((ErrorRecord.model_validate_json(path.read_text()) for path in files), key=_rank_of_error)
    if records and records[0].known:
        return records[0].error()
    said = (folder / ERROR_OUTPUT).read_text(errors="replace").strip()
    # The launcher ends the others by a signal too; it reports the first to fail last.
    killed = re.search(r"Signal \d+ \((\w+)\) received by PID \d+", said.rpartition("Root Cause")[2])
    if killed:
        cause = f"one was ended from outside, by {killed[1]}; the machine's memory may have run out"
    else:
        cause = f"{records[0].kind}: {records[0].message}" if records else "none of them said why"
    kind = LostUpdateProcessError if killed else UpdateProcessError
    return kind(
        f"the update's processes ended with code {code}: {cause}. The last policy version is whole; start again with "
        "the same command.\n" + "\n".join(said.splitlines()[-STDERR_TAIL_LINES:])
    )


def _rank_of_error(record: ErrorRecord) -> tuple[bool, float]:
    # A process that waited for one that failed tells of the lost connection.
    return (not record.known, record.seconds)
