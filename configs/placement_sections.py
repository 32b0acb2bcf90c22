"""Where stages are done, how often they are tried, and where their artifacts are kept. No result depends on it."""

from typing import Literal

from pydantic import Field

from configs.section import Digits, Name, Positive, Section


class StagePlacement(Section):
    """Where one stage is done."""

    pool: Name | None = Field(None, description="a work pool of the Prefect server; null: in this process")
    timeout: Positive | None = Field(
        None, description="seconds after which the stage is ended; it then runs in a process of its own"
    )


class ShardedStagePlacement(StagePlacement):
    """Where one stage is done that can be cut into shards of whole groups."""

    shards: Digits = Field(1, description="parts done side by side by the workers of the pool, joined in order")


class RetrySection(Section):
    """How often a stage is tried again after faults that may pass by themselves, each kind counted by itself.

    No other fault is ever tried again, and of a stage in shards each shard has tries of its own.
    """

    storage: int = Field(4, ge=0, description="a bucket, a network disk or a connection failed")
    service: int = Field(4, ge=0, description="a service did not answer, or said that it was busy")
    lost: int = Field(2, ge=0, description="the process or the worker that did the stage died")
    timeout: int = Field(1, ge=0, description="the stage was ended for being over its time")
    delay: Positive = Field(2.0, description="seconds before the second try; doubled each time, and spread at random")
    max_delay: Positive = Field(60.0, description="seconds between tries, at most")


class PlacementSection(Section):
    """Where the work is done; of a result it changes the rounding of the last bits alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: Digits = Field(1, description="measure before raising: on a small shared machine one is fastest")
    processes: Digits = Field(1, description="of the update, started by accelerate on one machine")
    sharding: Literal["ddp", "fsdp2"] = Field("ddp", description="every process holds the weights, or a share of them")
    rollouts: ShardedStagePlacement = ShardedStagePlacement()
    rewards: ShardedStagePlacement = ShardedStagePlacement()
    advantages: StagePlacement = StagePlacement()
    update: StagePlacement = StagePlacement()
    retries: RetrySection = RetrySection()


class StorageSection(Section):
    """Where runs are kept."""

    root: str = Field("runs", min_length=1, description="a folder or any fsspec URL")
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="copies of what was read from a bucket, on every machine of the run; null, or where it cannot be "
        "written: the user's cache folder",
    )
    cache_gib: Positive = Field(20.0, description="size of these copies, at most; the longest unread go first")
