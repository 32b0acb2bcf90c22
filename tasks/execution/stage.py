"""The stages by name: what they run, where their code begins, how they are cut into shards, and where one runs."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from configs.placement import PlacementSection, ShardedStagePlacement
from grpo_core.user_code.files import UserCode, follow_code
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import remove_folder

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
STAGES = tuple(_MODULES)  # kinds of stages that may run in another process
SHARDS = "shards"  # folder for the parts of the artifacts next to it


@dataclass(frozen=True)
class Part:
    """One shard of a stage: the name of its task run, and the arguments of the stage's function."""

    title: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Sharding:
    """How a stage is cut into parts."""

    # Returns the parts in order, given the arguments and the maximum number of shards.
    cut: Callable[[Arguments, int], list[Part]]
    # Returns the artifact that the uncut stage would have made, given the arguments and the parts' artifacts.
    join: Callable[[Arguments, list[ArtifactRef]], ArtifactRef]


@dataclass(frozen=True)
class Stage:
    """A stage that can run in several places."""

    name: str
    kind: Kind | None  # section of the placement; None if it always runs in the run's process
    function: Callable[..., Reference]
    # Returns the modules that the function imports by a name composed at run time, given the arguments.
    modules: Callable[[Arguments], tuple[str, ...]]
    sharding: Sharding | None = None
    # Returns whether it computes with the policy that its process keeps, given the arguments; such stages take turns in
    # one process.
    uses_policy: Callable[[Arguments], bool] = lambda arguments: False
    # Returns the references of the user's functions that it calls, given the arguments.
    functions: Callable[[Arguments], tuple[str, ...]] = lambda arguments: ()

    def roots(self, arguments: Arguments) -> tuple[str, ...]:
        """Return where the stage's code begins: its function, and modules that are not imported by a fixed name."""
        used = dict.fromkeys(each for code in self.user_code(arguments).values() for each in code.project)
        return f"{self.function.__module__}:{self.function.__qualname__}", *self.modules(arguments), *used

    def user_code(self, arguments: Arguments) -> dict[str, UserCode]:
        """Return the code of the user's functions that it calls, by their references; what has none is left out."""
        found = {}
        for reference in self.functions(arguments):
            # Loading it says that there is no such file.
            with contextlib.suppress(OSError):
                found[reference] = follow_code(reference)
        return found


_REGISTERED: dict[str, Stage] = {}


def register(stage: Stage) -> None:
    """Make a stage known by its name."""
    _REGISTERED[stage.name] = stage


def stage_named(name: str) -> Stage:
    """Import a stage's module and return the stage; ValueError if no such stage may run in another process."""
    if name not in _MODULES:
        raise ValueError(f"no stage {name!r}; there are {', '.join(_MODULES)}")
    importlib.import_module(_MODULES[name])
    return _REGISTERED[name]


def shard_folder(folder: str, index: int, count: int) -> str:
    """Return where the stages of a folder store one part, by its index from 0, until the parts are joined."""
    return f"{folder}/{SHARDS}/{index + 1:02d}of{count:02d}"


def clear_shards(store: ArtifactStore, folder: str) -> None:
    """Remove the parts of a folder's stages once their joined artifacts have been recorded."""
    remove_folder(store.filesystem, store.path(f"{folder}/{SHARDS}"))


@dataclass(frozen=True)
class Here:
    """The process of the run."""


@dataclass(frozen=True)
class Devices:
    """The processes of all devices, among which the stage's own function divides it."""


@dataclass(frozen=True)
class Device:
    """The process of one device, the first that is free; killed after `timeout` seconds."""

    timeout: float | None


@dataclass(frozen=True)
class Child:
    """A child process, since the stage is killed after `timeout` seconds."""

    timeout: float


@dataclass(frozen=True)
class Pool:
    """A worker of a work pool."""

    name: str
    timeout: float | None


@dataclass(frozen=True)
class Shards:
    """Several places: the stage is cut into at most `count` parts, each a stage of its own."""

    count: int


Place = Here | Devices | Device | Child | Pool | Shards


def place(stage: Stage, arguments: Arguments, *, on_worker: bool = False) -> Place:
    """Return where a stage runs.

    With `on_worker`, a worker or a child of the run has the stage already; rollouts take one of its devices, as the
    update that follows takes all of them.
    """
    if stage.kind is None:
        return Here()
    placement: PlacementSection = arguments["placement"]
    uses_policy, where = stage.uses_policy(arguments), getattr(placement, stage.kind)
    # A reward may name another pool.
    if pool := getattr(arguments.get("section"), "pool", None):
        where = where.model_copy(update={"pool": pool})
    if on_worker:
        is_sampling = stage.kind == "rollouts" and uses_policy
        return Device(None) if is_sampling and placement.in_processes else Here()
    has_models = stage.kind == "rewards" or uses_policy
    if stage.sharding is not None and isinstance(where, ShardedStagePlacement) and (where.pool or has_models):
        count = placement.shards_of(where)
        if count > 1:
            return Shards(count)
    if where.pool is not None:
        return Pool(where.pool, where.timeout)
    if has_models and placement.names_devices_here:
        return Devices() if stage.kind == "update" else Device(where.timeout)
    return Here() if where.timeout is None else Child(where.timeout)
