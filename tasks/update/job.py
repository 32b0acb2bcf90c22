"""One policy update from its artifacts to the files of the next version, in this process or shared with others."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.sections import PlacementSection, StorageSection
from configs.training import UpdateSection
from grpo_core.errors import InputError
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.protocol import Policy
from grpo_core.seeds import derive_seed
from grpo_core.update import ProcessGroup, StepMetrics, UpdateResult, update_policy
from tasks.execution.peak_memory import peak_memory, reset_peak_memory
from tasks.execution.resources import resource
from tasks.models.files import EMA_FOLDER, REFERENCE_FOLDER, weights_digest
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.runs.layout import OPTIMIZER_FILE, STATE_FILE
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import UPDATE_STEPS
from tasks.update.rows import read_training_rows


class UpdateJob(BaseModel):
    """Everything that an update needs; its artifacts are in the current store.

    Attributes:
        policy: the version that is trained.
        rollouts: one artifact per sampling round.
        advantages: of all rounds.
        model: the model's files.
        update: the update's options.
        seed: the run's seed.
        max_staleness: how many versions a row's policy may be older than this one.
        placement: device, threads and number of processes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    rollouts: tuple[ArtifactRef, ...]
    advantages: ArtifactRef
    model: ModelSpec
    update: UpdateSection
    seed: int
    max_staleness: int
    placement: PlacementSection

    @property
    def version(self) -> int:
        """Version of the policy that the update makes."""
        return self.policy.version + 1


class SharedJob(BaseModel):
    """A job for other processes.

    Attributes:
        job: the same for all of them.
        storage: where the artifacts are.
        run: whose artifacts they are.
        staged: folder that the first process writes to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: UpdateJob
    storage: StorageSection
    run: str
    staged: str


class UpdateOutcome(BaseModel):
    """What an update wrote to its folder.

    Attributes:
        digest: of the weights.
        reference_digest: of the reference's weights; None while the reference is the initial policy.
        ema_digest: of the moving average of the weights; None where none is kept.
        checkpoint_digest: of everything that the next update reads.
        rows: how many it trained on.
        metrics: by name.
        peak_memory: most bytes allocated on the GPU of the first process; None without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    reference_digest: str | None
    ema_digest: str | None
    checkpoint_digest: str
    rows: int
    metrics: dict[str, float]
    peak_memory: int | None = None


def refuse_unusable_placement(placement: PlacementSection, update: UpdateSection) -> None:
    """Raise InputError for a number of processes, or a way to shard the weights, that this machine cannot run."""
    if placement.sharding == "fsdp2" and placement.processes == 1:
        hint = "One process cannot shard the weights; set placement.processes to 2 or more, or this to ddp."
        raise InputError("placement.sharding", "fsdp2", hint)
    if placement.sharding == "fsdp2" and update.optimizer != "adamw":
        hint = "8-bit and paged moments cannot be sharded; use adamw, or set placement.sharding to ddp."
        raise InputError("update.optimizer", update.optimizer, hint)
    on_cpu = placement.device == "cpu" or (placement.device == "auto" and not torch.cuda.is_available())
    if placement.processes == 1:
        return
    if on_cpu:
        # Two processes are allowed on any machine, so that the feature can be tried everywhere.
        cores = max(2, len(os.sched_getaffinity(0)))
        if placement.processes > cores:
            hint = f"Each process needs a core and this machine has {cores}; use at most that."
            raise InputError("placement.processes", placement.processes, hint)
        return
    gpus = torch.cuda.device_count()
    if placement.processes > gpus:
        hint = f"Each process needs a GPU and this machine has {gpus}; use at most that, or device: cpu."
        raise InputError("placement.processes", placement.processes, hint)


def carry_out(
    job: UpdateJob, staged: Path, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
) -> UpdateOutcome | None:
    """Read, check parity, train, and write the next version's files.

    Args:
        process_group: the processes that share the update; each takes its part of every minibatch.
        on_progress: called with passes done and the total.

    Returns:
        What was written; None in every process but the first.

    Raises:
        InputError, ParityError, NonFiniteError, StaleReferenceError, ValueError: as the functions that it calls.
    """
    reset_peak_memory()
    with tempfile.TemporaryDirectory() as fetched:
        stored = read_training_rows(
            current_store(),
            job.rollouts,
            job.advantages,
            job.policy,
            job.model.family,
            Path(fetched),
            max_staleness=job.max_staleness,
        )
        resident = resource(ResidentPolicy)
        learner = resident.at(job.policy, job.model, stored.settings, job.placement)
        resident.begin_update()
        _begin_average(learner, job, Path(fetched))
        process_group.distribute(learner.trained)
        optimizer = _optimizer(job, learner, process_group, Path(fetched))
        result = update_policy(
            learner,
            optimizer,
            stored.rows,
            job.update,
            seed=derive_seed(job.seed, job.version, "minibatches"),
            parity=job.update.parity.tolerance(in_fp32=job.model.section.in_fp32),
            process_group=process_group,
            on_progress=on_progress,
        )
    optimizer.zero_grad()  # frees the gradients' memory for the next rollouts
    moments = process_group.state(optimizer)
    process_group.collect(learner.trained)
    if process_group.rank:
        return None
    reference_digest = _keep_reference(learner, job, staged)
    ema_digest = _keep_average(learner, job, staged)
    learner.save_weights(staged)
    digest = weights_digest(staged)
    _save_state(staged, moments, optimizer.steps, result, job.version, digest)
    return UpdateOutcome(
        digest=digest,
        reference_digest=reference_digest,
        ema_digest=ema_digest,
        checkpoint_digest=_checkpoint_digest(staged, reference_digest, ema_digest),
        rows=len(stored.rows),
        metrics={**result.metrics(), **stored.metrics()},
        peak_memory=peak_memory(),
    )


def _optimizer(job: UpdateJob, learner: Policy, process_group: ProcessGroup, fetched: Path) -> PolicyOptimizer:
    checkpoint = job.policy.checkpoint
    parameters = learner.trainable_parameters()
    if checkpoint is None or job.policy.version == 0:
        # A run that starts from the weights of another begins with its own schedule and without moments.
        return PolicyOptimizer(parameters, job.update)
    folder = current_store().local_files(checkpoint, fetched / "policy")
    state = json.loads((folder / STATE_FILE).read_text())
    optimizer = PolicyOptimizer(parameters, job.update, steps=state["optimizer_steps"])
    process_group.load_state(optimizer, load_file(folder / OPTIMIZER_FILE))
    return optimizer


def _keep_reference(learner: Policy, job: UpdateJob, staged: Path) -> str | None:
    """Refresh the reference when due, and write it next to the weights; return the digest of the files."""
    every = job.update.reference.refresh_every
    due = every > 0 and job.version % every == 0
    if due:
        resource(ResidentPolicy).begin_reference_refresh()
        learner.trained.refresh_reference(job.update.reference.mix)
    if not due and job.policy.reference_digest is None:
        return None
    folder = staged / REFERENCE_FOLDER
    folder.mkdir()
    learner.trained.save_reference(folder)
    return weights_digest(folder)


def _begin_average(learner: Policy, job: UpdateJob, fetched: Path) -> None:
    """Continue the version's moving average, or begin one with its weights."""
    if job.update.ema is None:
        return
    stored = job.policy.checkpoint if job.policy.ema_digest is not None else None
    folder = None if stored is None else current_store().local_files(stored, fetched / "policy") / EMA_FOLDER
    learner.trained.begin_average(folder)


def _keep_average(learner: Policy, job: UpdateJob, staged: Path) -> str | None:
    """Write the moving average next to the weights; return the digest of the files."""
    if job.update.ema is None:
        return None
    folder = staged / EMA_FOLDER
    folder.mkdir()
    learner.trained.end_average(folder)
    return weights_digest(folder)


def _save_state(
    folder: Path, moments: dict[str, Tensor], steps: int, result: UpdateResult, version: int, digest: str
) -> None:
    save_file(moments, folder / OPTIMIZER_FILE)
    state = {
        "policy_version": version,
        "policy_digest": digest,
        "optimizer_steps": steps,
        # No random state is stored: every random number is derived from its place.
        "randomness": "derived from (run seed, iteration, stage, sample)",
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True))
    columns: dict[str, list[Any]] = {"optimizer_step": list(range(steps - len(result.steps) + 1, steps + 1))}
    columns |= {field.name: [getattr(step, field.name) for step in result.steps] for field in fields(StepMetrics)}
    write_table(folder / "update_steps.parquet", UPDATE_STEPS, columns)


def _checkpoint_digest(folder: Path, reference_digest: str | None, ema_digest: str | None) -> str:
    """Return the sha256 of what the next update reads: weights, reference, moving average, moments, step count."""
    average = "" if ema_digest is None else f" {ema_digest}"
    digest = hashlib.sha256(f"{weights_digest(folder)} {reference_digest}{average}".encode())
    for name in (OPTIMIZER_FILE, STATE_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
