"""The stages by name. A name that comes from elsewhere is looked up here and nowhere else."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from configs.placement_sections import PlacementSection, ShardedStagePlacement, StagePlacement
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef

Kind = Literal["rollouts", "rewards", "advantages", "update"]
Arguments = Mapping[str, Any]
Reference = ArtifactRef | PolicyRef

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "collect rollouts": "tasks.rollouts.collect",
        "score reward": "tasks.rewards.score",
        "compute advantages": "tasks.advantages.compute",
        "update policy": "tasks.update.policy",
    }
)
STAGES = tuple(_MODULES)
"""Those that may be done elsewhere."""


@dataclass(frozen=True)
class Part:
    """One shard of a stage.

    Attributes:
        title: of its task run.
        arguments: of the stage's function.
    """

    title: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Sharding:
    """How a stage is done in parts.

    Attributes:
        cut: arguments and a number of shards -> the parts in order, at most that many.
        join: arguments and the parts in order -> the artifact that one would have made.
    """

    cut: Callable[[Arguments, int], list[Part]]
    join: Callable[[Arguments, list[ArtifactRef]], ArtifactRef]


@dataclass(frozen=True)
class Stage:
    """A stage as something that can be done in several places.

    Attributes:
        name: in the UI and on the command line.
        kind: its section of the placement; None: it is always done here.
        function: does it.
        sharding: None where it is done in one piece.
    """

    name: str
    kind: Kind | None
    function: Callable[..., Reference]
    sharding: Sharding | None = None

    def where(self, arguments: Arguments) -> StagePlacement:
        """What the placement says of it; a reward may have a pool of its own."""
        if self.kind is None:
            return StagePlacement()
        placement: PlacementSection = arguments["placement"]
        where: StagePlacement = getattr(placement, self.kind)
        own = getattr(arguments.get("section"), "pool", None)
        return where.model_copy(update={"pool": own}) if own else where

    def shards(self, arguments: Arguments) -> int:
        """Parts that it is to be done in."""
        where = self.where(arguments)
        sharded = isinstance(where, ShardedStagePlacement) and self.sharding and where.pool
        return where.shards if sharded and isinstance(where, ShardedStagePlacement) else 1


_REGISTERED: dict[str, Stage] = {}


def register(stage: Stage) -> None:
    """Make a stage known by its name."""
    _REGISTERED[stage.name] = stage


def stage_named(name: str) -> Stage:
    """The stage of this name, its module imported.

    Raises:
        ValueError: there is none that may be done elsewhere.
    """
    if name not in _MODULES:
        raise ValueError(f"no stage {name!r}; there are {', '.join(_MODULES)}")
    importlib.import_module(_MODULES[name])
    return _REGISTERED[name]
