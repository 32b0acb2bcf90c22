"""What an update is asked for and what it made, as records for any process, and where it cannot run."""

import os
from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict

from configs.sections import PlacementSection, StorageSection
from configs.training import AnyUpdateSection
from grpo_core.errors import InputError
from grpo_core.streams import UNEQUAL_PASSES, Stream
from tasks.models.resident import ModelSpec
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


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
        policy: the next version, whose checkpoint is still to be committed.
        checkpoint_digest: of everything that the next update reads.
        synced: sha256 of the files that are on the disk already.
        rows: how many samples it trained on.
        metrics: by name; those of a second component have the name of its stream in front.
        peak_memory: most bytes allocated on the GPU of the first process; None without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    checkpoint_digest: str
    synced: dict[str, str]
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
    for stream, update in updates.items():
        section = f"update.{stream}" if len(updates) > 1 else "update"
        if update.optimizer != "adamw":
            hint = "8-bit and paged moments cannot be sharded; use adamw, or set placement.sharding to ddp."
            raise InputError(f"{section}.optimizer", update.optimizer, hint)
        if stream in UNEQUAL_PASSES and update.micro_batch_size > 1:
            hint = (
                "Processes that share sharded weights make equally many passes, and rows of other prompts or image "
                "sizes take passes of their own; set it to 1, or placement.sharding to ddp."
            )
            raise InputError(f"{section}.micro_batch_size", update.micro_batch_size, hint)
