"""The stages by name, and how one is cut into shards. A name from a call is looked up here and nowhere else."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from configs.sections import PlacementSection, ShardedStagePlacement, StagePlacement
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

Kind = Literal["rollouts", "rewards", "advantages", "update"]
Arguments = Mapping[str, Any]
Reference = ArtifactRef | PolicyRef

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "collect rollouts": "tasks.rollouts.collect_rollouts",
        "score reward": "tasks.rewards.score_rewards",
        "compute advantages": "tasks.advantages.compute_advantages",
        "update policy": "tasks.update.update_policy",
    }
)
STAGES = tuple(_MODULES)
"""Kinds of stages that may run in another process."""
SHARDS = "shards"
"""Folder for the parts of the artifacts next to it."""


@dataclass(frozen=True)
class Part:
    """One shard of a stage: the name of its task run, and the arguments of the stage's function."""

    title: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Sharding:
    """How a stage is cut into parts.

    Attributes:
        cut: returns the parts in order, given the arguments and the maximum number of shards.
        join: returns the artifact that the uncut stage would have made, given the arguments and the parts' artifacts.
    """

    cut: Callable[[Arguments, int], list[Part]]
    join: Callable[[Arguments, list[ArtifactRef]], ArtifactRef]


@dataclass(frozen=True)
class Stage:
    """A stage that can run in several places.

    Attributes:
        kind: section of the placement; None if it always runs in the run's process.
        modules: returns the modules that the function imports by a name composed at run time, given the arguments.
    """

    name: str
    kind: Kind | None
    function: Callable[..., Reference]
    modules: Callable[[Arguments], tuple[str, ...]]
    sharding: Sharding | None = None

    def roots(self, arguments: Arguments) -> tuple[str, ...]:
        """Return where the stage's code begins: its function, and modules that are not imported by a fixed name."""
        return f"{self.function.__module__}:{self.function.__qualname__}", *self.modules(arguments)

    def where(self, arguments: Arguments) -> StagePlacement:
        """Return its section of the placement; a reward may name another pool."""
        if self.kind is None:
            return StagePlacement()
        placement: PlacementSection = arguments["placement"]
        where: StagePlacement = getattr(placement, self.kind)
        pool = getattr(arguments.get("section"), "pool", None)
        return where.model_copy(update={"pool": pool}) if pool else where

    def shards(self, arguments: Arguments) -> int:
        """Return the number of parts that the placement requests."""
        where = self.where(arguments)
        is_cut = self.sharding is not None and where.pool is not None
        return where.shards if is_cut and isinstance(where, ShardedStagePlacement) else 1


_REGISTERED: dict[str, Stage] = {}


def register(stage: Stage) -> None:
    """Make a stage known by its name."""
    _REGISTERED[stage.name] = stage


def stage_named(name: str) -> Stage:
    """Import a stage's module and return the stage.

    Raises:
        ValueError: no stage of this name may run in another process.
    """
    if name not in _MODULES:
        raise ValueError(f"no stage {name!r}; there are {', '.join(_MODULES)}")
    importlib.import_module(_MODULES[name])
    return _REGISTERED[name]


def shard_folder(folder: str, index: int, count: int) -> str:
    """Return where the stages of a folder store one part, by its index from 0, until the parts are joined."""
    return f"{folder}/{SHARDS}/{index + 1:02d}of{count:02d}"


def clear_shards(store: ArtifactStore, folder: str) -> None:
    """Remove the parts of a folder's stages once their joined artifacts have been recorded."""
    path = store.path(f"{folder}/{SHARDS}")
    if store.filesystem.exists(path):
        store.filesystem.rm(path, recursive=True)


def unsharded(arguments: Arguments) -> PlacementSection:
    """Return the placement of a shard, which is not cut again."""
    placement: PlacementSection = arguments["placement"]
    kinds = ("rollouts", "rewards")
    return placement.model_copy(
        update={kind: getattr(placement, kind).model_copy(update={"shards": 1}) for kind in kinds}
    )
