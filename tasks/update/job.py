"""One policy update from its artifacts to the files of the next version, in this process or shared with others."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from configs.sections import PlacementSection, StorageSection
from configs.training import AnyUpdateSection
from grpo_core.errors import InputError
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.streams import UNEQUAL_PASSES, Stream
from grpo_core.update import ProcessGroup
from tasks.execution.memory import peak_memory, reset_peak_memory
from tasks.execution.resources import resource
from tasks.models.files import EMA_FOLDER, OLD_FOLDER, REFERENCE_FOLDER, weights_digest
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.runs.layout import OPTIMIZER_FILE, STATE_FILE
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.update.component import ComponentUpdate
from tasks.update.rows import StoredRows, read_training_rows


class UpdateJob(BaseModel):
    """Everything that an update needs; its artifacts are in the current store.

    Attributes:
        policy: the version that is trained.
        rollouts: one artifact per sampling round.
        advantages: of all rounds.
        model: the model's files.
        updates: the options of the update of each trained component, in the order in which they are trained.
        seed: the run's seed.
        max_staleness: how many versions a row's policy may be older than this one.
        placement: device, threads and number of processes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    rollouts: tuple[ArtifactRef, ...]
    advantages: ArtifactRef
    model: ModelSpec
    updates: Mapping[Stream, AnyUpdateSection]
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
        old_digest: of the weights that sample; None where the trained ones do.
        checkpoint_digest: of everything that the next update reads.
        settled: sha256 of the files that are on the disk already.
        rows: how many samples it trained on.
        metrics: by name; those of a second component have the name of its stream in front.
        peak_memory: most bytes allocated on the GPU of the first process; None without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    reference_digest: str | None
    ema_digest: str | None
    old_digest: str | None
    checkpoint_digest: str
    settled: dict[str, str]
    rows: int
    metrics: dict[str, float]
    peak_memory: int | None = None


def refuse_unusable_placement(placement: PlacementSection, updates: Mapping[Stream, AnyUpdateSection]) -> None:
    """Raise InputError for a number of processes, or a way to shard the weights, that this machine cannot run."""
    if placement.sharding == "fsdp2":
        _refuse_unusable_sharding(placement, updates)
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


def _refuse_unusable_sharding(placement: PlacementSection, updates: Mapping[Stream, AnyUpdateSection]) -> None:
    if placement.processes == 1:
        hint = "One process cannot shard the weights; set placement.processes to 2 or more, or this to ddp."
        raise InputError("placement.sharding", "fsdp2", hint)
    for place, (stream, update) in enumerate(updates.items()):
        section = f"update.{stream}" if place else "update"
        if update.optimizer != "adamw":
            hint = "8-bit and paged moments cannot be sharded; use adamw, or set placement.sharding to ddp."
            raise InputError(f"{section}.optimizer", update.optimizer, hint)
        if stream in UNEQUAL_PASSES and update.micro_batch_size > 1:
            hint = (
                "Processes that share sharded weights make equally many passes, and rows of other prompts or image "
                "sizes take passes of their own; set it to 1, or placement.sharding to ddp."
            )
            raise InputError(f"{section}.micro_batch_size", update.micro_batch_size, hint)


def carry_out(
    job: UpdateJob, staged: Path, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
) -> UpdateOutcome | None:
    """Read, then check parity, train and write the next version's files, one component after the other.

    Args:
        process_group: the processes that share the update; each takes its part of every minibatch.
        on_progress: called with passes done and the total.

    Returns:
        What was written; None in every process but the first.

    Raises:
        InputError, ParityError, NonFiniteError, StaleReferenceError, ValueError: as the functions that it calls. No
            version is made then, whichever component failed.
    """
    reset_peak_memory()
    with tempfile.TemporaryDirectory() as fetched:
        stored = {stream: _read_rows(job, stream, Path(fetched)) for stream in job.updates}
        resident = resource(ResidentPolicy)
        settings = next(iter(stored.values())).settings
        learner = resident.at(job.policy, job.model, settings, job.placement)
        kept = resident.begin_update(job.policy, job.updates)

        @cache
        def previous() -> Path | None:
            checkpoint = job.policy.checkpoint
            return None if checkpoint is None else current_store().local_files(checkpoint, Path(fetched) / "policy")

        optimizers: dict[Stream, PolicyOptimizer] = {}
        metrics: dict[str, float] = {}
        for place, (stream, rows) in enumerate(stored.items()):
            report = _share_of_progress(place, len(stored), on_progress)
            component = ComponentUpdate(job, stream, learner.components[stream], previous, kept.get(stream), staged)
            result, optimizers[stream] = component.run(rows, process_group, report)
            prefix = f"{stream}/" if place else ""
            metrics |= {f"{prefix}{name}": value for name, value in (result.metrics() | rows.metrics()).items()}
    if process_group.rank:
        return None
    settled = current_store().settle(staged)
    known = {staged / name: sha256 for name, sha256 in settled.items()}
    digest, reference_digest, ema_digest, old_digest = (
        weights_digest(folder, known) if folder.is_dir() else None
        for folder in (staged, staged / REFERENCE_FOLDER, staged / EMA_FOLDER, staged / OLD_FOLDER)
    )
    assert digest is not None, "the folder is there"
    _save_state(staged, {stream: optimizer.steps for stream, optimizer in optimizers.items()}, job.version, digest)
    moments = [known[staged / stream / OPTIMIZER_FILE] for stream in job.updates]
    checkpoint_digest = _checkpoint_digest(
        f"{digest} {reference_digest} {ema_digest} {old_digest}", moments, (staged / STATE_FILE).read_text()
    )
    if process_group.count == 1:
        resident.keep_optimizers(checkpoint_digest, job.updates, optimizers)
    return UpdateOutcome(
        digest=digest,
        reference_digest=reference_digest,
        ema_digest=ema_digest,
        old_digest=old_digest,
        checkpoint_digest=checkpoint_digest,
        settled=settled,
        rows=len({sample_id for each in stored.values() for sample_id in each.rows.sample_ids}),
        metrics=metrics,
        peak_memory=peak_memory(),
    )


def _read_rows(job: UpdateJob, stream: Stream, fetched: Path) -> StoredRows:
    return read_training_rows(
        current_store(),
        job.rollouts,
        job.advantages,
        job.policy,
        job.model.family,
        fetched,
        stream=stream,
        max_staleness=job.max_staleness,
    )


def _share_of_progress(
    place: int, count: int, on_progress: Callable[[int, int], None] | None
) -> Callable[[int, int], None] | None:
    """Return what reports one component's passes as an equal share of the passes of all components."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(place * total + done, count * total)


def _save_state(folder: Path, steps: Mapping[Stream, int], version: int, digest: str) -> None:
    state = {
        "policy_version": version,
        "policy_digest": digest,
        "optimizer_steps": dict(steps),
        # No random state is stored: every random number is derived from its place.
        "randomness": "derived from (run seed, iteration, stage, sample)",
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True))


def _checkpoint_digest(weights: str, moments: Sequence[str], state: str) -> str:
    """Return the sha256 of what the next update reads.

    Args:
        weights: digests of the weights, of the reference's, of their moving average, and of those that sample.
        moments: sha256 of each optimizer's file.
        state: the training state.
    """
    return hashlib.sha256("\n".join([weights, *moments, state]).encode()).hexdigest()
