"""What an update is asked for and what it made, as records for any process, and where it cannot run."""

import os
from collections.abc import Collection, Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from configs.placement import PlacementSection, StorageSection
from configs.training import AnyUpdateSection
from grpo_core.errors import InputError
from grpo_core.rollouts.streams import UNEQUAL_PASSES, Stream
from tasks.models.devices import refuse_missing_devices
from tasks.models.resident import ModelSpec
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


class UpdateJob(BaseModel):
    """Everything that an update needs; its artifacts are in the current store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef  # the version that is trained
    rollouts: tuple[ArtifactRef, ...]  # one artifact per sampling round
    advantages: ArtifactRef  # of all rounds
    model: ModelSpec
    # The options of the update of each trained component, in the order in which they are trained.
    updates: Mapping[Stream, AnyUpdateSection]
    seed: int  # the run's seed
    max_staleness: int  # how many versions a row's policy may be older than this one
    placement: PlacementSection

    @property
    def version(self) -> int:
        """Version of the policy that the update makes."""
        return self.policy.version + 1


class Member(BaseModel):
    """The place of a process among those of an update, which find each other in a TCPStore by their group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    count: int
    host: str
    port: int
    group: str


class SharedJob(BaseModel):
    """A job for one of several processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: UpdateJob  # the same for all of them but for the placement, which names the device of the process
    storage: StorageSection
    run: str  # whose artifacts they are
    staged: str  # folder that the first process writes to
    member: Member | None = None  # the place of the process among the others; None if it is the only one


class UpdateOutcome(BaseModel):
    """What an update wrote to its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef  # the next version, whose checkpoint is still to be committed
    checkpoint_digest: str  # of everything that the next update reads
    synced: dict[str, str]  # sha256 of the files that are on the disk already
    rows: int  # how many samples it trained on
    metrics: dict[str, float]  # by name; those of a second component have the name of its stream in front
    peak_memory: int | None = None  # most bytes allocated on the GPU of the first process; None without a GPU


def refuse_unusable_placement(
    placement: PlacementSection, updates: Mapping[Stream, AnyUpdateSection], machines: int = 1
) -> None:
    """Raise InputError for devices, or a way to shard the weights, that so many machines cannot run."""
    refuse_missing_devices(placement.devices)
    if machines > 1 and not placement.in_processes:
        hint = "Machines that share an update have a process per device; name the devices, such as [0] or [cpu, cpu]."
        raise InputError("placement.devices", list(placement.devices), hint)
    if placement.sharding == "fsdp2":
        _refuse_unusable_sharding(len(placement.devices) * machines, updates)
    # Two processes are allowed on any machine, so that the feature can be tried everywhere.
    count, cores = placement.devices.count("cpu"), max(2, len(os.sched_getaffinity(0)))
    if count > cores:
        hint = f"The process of each needs a core and this machine has {cores}; name it at most that often."
        raise InputError("placement.devices", f"{count} times cpu", hint)


def _refuse_unusable_sharding(processes: int, updates: Mapping[Stream, AnyUpdateSection]) -> None:
    if processes == 1:
        hint = "One process cannot shard the weights; name several in placement.devices, or set this to ddp."
        raise InputError("placement.sharding", "fsdp2", hint)
    for stream, update in updates.items():
        section = f"update.{stream}" if len(updates) > 1 else "update"
        if update.optimizer != "adamw":
            hint = "Only the moments of adamw are sharded; use it, or set placement.sharding to ddp."
            raise InputError(f"{section}.optimizer", update.optimizer, hint)
        if stream in UNEQUAL_PASSES and update.micro_batch_size > 1:
            hint = "Processes with sharded weights make equally many passes; set it to 1, or placement.sharding to ddp."
            raise InputError(f"{section}.micro_batch_size", update.micro_batch_size, hint)


def refuse_unequal_sources(placement: PlacementSection, streams: Collection[Stream], images: Iterable[int]) -> None:
    """Raise InputError for numbers of images in prompts, each of which takes a pass of a decoder that is sharded."""
    if placement.sharding != "fsdp2" or UNEQUAL_PASSES.isdisjoint(streams):
        return
    if len(counts := {*images}) > 1:
        hint = (
            "Processes with sharded weights make equally many passes, and a decoder makes one for each image of a "
            f"prompt; prompts have {min(counts)} to {max(counts)}. Set it to ddp, or give all prompts as many images."
        )
        raise InputError("placement.sharding", "fsdp2", hint)
