"""The sections about where the stages run and where runs are kept."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from configs.validation import Name, Section
from grpo_core.errors import InputError
from grpo_core.uses import Uses

Device = Literal["auto", "cpu", "cuda"] | NonNegativeInt
"""A device of this machine; a number is the index of a GPU, as PyTorch counts them."""


class StagePlacement(Section):
    """Where one stage runs."""

    pool: Name | None = Field(None, description="a work pool of the Prefect server; null: in this process")
    timeout: PositiveFloat | None = Field(
        None, description="seconds after which the stage is stopped; runs it in a separate process"
    )


class ShardedStagePlacement(StagePlacement):
    """Where a stage runs that can be split into shards of complete groups."""

    shards: PositiveInt | None = Field(
        None, description="shards that run in parallel, joined in order; null: one per device, on a pool 1"
    )


_COUNTED_ALONE = frozenset({"storage", "service", "lost", "timeout", "max_delay"})


class RetrySection(Section):
    """How often a stage is tried that meets temporary errors."""

    tries: PositiveInt = Field(
        5, description="of a stage after temporary errors and timeouts; each shard is counted alone"
    )
    delay: PositiveFloat = Field(
        2.0, description="seconds before the second try; doubled each time up to a minute, with jitter"
    )

    @model_validator(mode="before")
    @classmethod
    def _counted_together(cls, values: Any) -> Any:
        """Say what replaces the keys that files may still have."""
        if isinstance(values, Mapping) and not _COUNTED_ALONE.isdisjoint(values):
            raise PydanticCustomError("retries", "All temporary errors count together: write {tries: 5, delay: 2}")
        return values


class PlacementSection(Section):
    """Where the stages run; it changes results by rounding at most."""

    devices: tuple[Device, ...] = Field(
        ("auto",),
        min_length=1,
        description="auto, cpu or cuda: models run in the run's process, auto on a GPU if there is one. [0, 1] or "
        "[cpu, cpu]: a process per device",
    )
    torch_threads: PositiveInt = Field(
        1, description="of each process; measure before raising: on a small shared machine 1 is fastest"
    )
    sharding: Literal["ddp", "fsdp2"] = Field("ddp", description="ddp: each process has all weights; fsdp2: a share")
    rollouts: ShardedStagePlacement = ShardedStagePlacement()
    rewards: ShardedStagePlacement = ShardedStagePlacement()
    advantages: StagePlacement = StagePlacement()
    update: StagePlacement = StagePlacement()
    retries: RetrySection = RetrySection()

    @field_validator("devices", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    def contradictions(self) -> Iterator[InputError]:
        """Yield devices that cannot be named together."""
        indices, hint = [each for each in self.devices if isinstance(each, int)], ""
        if len(self.devices) > 1 and len(indices) < len(self.devices) and set(self.devices) != {"cpu"}:
            hint = "Several devices are either GPUs by their index or the CPU: [0, 1], or [cpu, cpu]."
        elif len(set(indices)) < len(indices):
            hint = "Each GPU has one process; name it once. To sample more at once raise rollout.prompts_per_batch."
        if hint:
            yield InputError("devices", list(self.devices), hint)

    @property
    def in_processes(self) -> bool:
        """Whether each device has a process; a GPU named by its index is seen by no other process of the run."""
        return len(self.devices) > 1 or isinstance(self.devices[0], int)

    @property
    def names_devices_here(self) -> bool:
        """Whether these processes are the run's; with rollouts and updates on pools they are the workers'."""
        return self.in_processes and not (self.rollouts.pool and self.update.pool)

    def shards_of(self, where: ShardedStagePlacement) -> int:
        """Return the number of parts into which the stage of this section is cut."""
        if where.pool is None and not self.names_devices_here:
            return 1
        return where.shards or (len(self.devices) if where.pool is None else 1)

    def uncut(self) -> Self:
        """Return the placement of a part of a stage."""
        kinds = ("rollouts", "rewards")
        return self.model_copy(update={kind: getattr(self, kind).model_copy(update={"shards": 1}) for kind in kinds})

    def here(self) -> Self:
        """Return the placement without work pools and without the processes that timeouts need."""
        alone = {"pool": None, "timeout": None}
        kinds = ("rollouts", "rewards", "advantages", "update")
        return self.model_copy(update={kind: getattr(self, kind).model_copy(update=alone) for kind in kinds})

    def on(self, device: Device) -> Self:
        """Return the placement for the process of one device, which sees no other GPU."""
        return self.model_copy(update={"devices": ("cuda" if isinstance(device, int) else device,)})


class StorageSection(Section):
    """Where runs are kept."""

    root: Annotated[str, Uses.ROOT] = Field(
        "runs",
        min_length=1,
        description="a folder, or an fsspec URL that refuses to create a file twice, such as s3://",
    )
    cache_dir: Annotated[str | None, Uses.WRITTEN] = Field(
        None,
        min_length=1,
        description="local copies of files read from a bucket; null, or not writable: the user's cache folder",
    )
    cache_gib: PositiveFloat = Field(20.0, description="maximum size of these copies; the oldest are deleted first")
