"""The stages by name, and a stage with its arguments as JSON, for another process or machine, and its outcome.

A call for another machine is a file in the run's folder until the stage is recorded there, or the call is withdrawn.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from configs.sections import PlacementSection, ShardedStagePlacement, StagePlacement, StorageSection
from grpo_core.errors import InputError
from grpo_core.user_code import UserCode, follow_code
from tasks.execution.child_process import ChildProcess
from tasks.execution.devices import DeviceProcesses
from tasks.execution.errors import ErrorRecord, LostStageError, StageCancelledError, StageTimeoutError, record_of
from tasks.execution.fingerprint import code_fingerprint, library_versions
from tasks.execution.resources import resource
from tasks.progress import listener
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, described, open_store_elsewhere, use_store
from tasks.storage.files import dump_checked, load_checked, remove_folder

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
        functions: returns the references of the user's functions that it calls, given the arguments.
        uses_policy: returns whether it computes with the policy that its process keeps, given the arguments; such
            stages take turns in one process.
    """

    name: str
    kind: Kind | None
    function: Callable[..., Reference]
    modules: Callable[[Arguments], tuple[str, ...]]
    sharding: Sharding | None = None
    uses_policy: Callable[[Arguments], bool] = lambda arguments: False
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
        if self.sharding is None or not isinstance(where, ShardedStagePlacement):
            return 1
        placement: PlacementSection = arguments["placement"]
        return placement.shards_of(where) if where.pool or self.runs_on_devices(arguments) else 1

    def runs_on_devices(self, arguments: Arguments) -> bool:
        """Return whether the stage computes with models of its own, in the processes of devices if there are any."""
        return self.kind == "rewards" or self.uses_policy(arguments)


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
    remove_folder(store.filesystem, store.path(f"{folder}/{SHARDS}"))


def unsharded(arguments: Arguments) -> PlacementSection:
    """Return the placement of a shard, which is not cut again."""
    placement: PlacementSection = arguments["placement"]
    return placement.uncut()


CALLS = ".calls"
"""Folder of a run for the calls of its stages to other machines."""


class StageCall(BaseModel):
    """A stage to be run elsewhere, on artifacts of a run.

    Attributes:
        storage: the root as every machine of the run finds it, and the folder for copies of what is read.
        roots: where the stage's code begins.
        code: digest of that code and of the libraries' versions, which the worker must have too.
        functions: digest of the code of each of the user's functions, by its reference, which it must have too.
        arguments: arguments of the stage's function, as JSON values.
        key: of the stage's record, if another machine runs it and writes the record; the run may then withdraw the
            call by removing its file, and the stage commits nothing. None for a child of the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    storage: StorageSection
    run: str
    roots: tuple[str, ...]
    code: str
    arguments: dict[str, Any]
    functions: dict[str, str] = {}
    key: str | None = None

    @property
    def digest(self) -> str:
        """sha256 that names the call: stage, inputs and placement, but not where copies of the inputs are kept."""
        named = self.model_dump(mode="json", exclude={"storage": {"cache_dir", "cache_gib"}})
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


class StageOutcome(BaseModel):
    """The outcome of a call: what the stage made, or its error; and why files were quarantined meanwhile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made: Reference | None = None
    error: ErrorRecord | None = None
    reasons: tuple[str, ...] = ()

    def reference(self) -> Reference:
        """Return what the stage made.

        Raises:
            Exception: the error that it failed with; one that cannot be rebuilt here as RemoteStageError.
        """
        if self.error is not None:
            raise self.error.error()
        assert self.made is not None, "an outcome has a reference or an error"
        return self.made


def call_of(stage: Stage, arguments: Arguments, store: ArtifactStore, key: str | None = None) -> StageCall:
    """Describe the stage with these arguments for a child of this process, or under its key for another machine."""
    hints, roots = _hints(stage.function), stage.roots(arguments)
    return StageCall(
        stage=stage.name,
        storage=described(store),
        run=store.run,
        roots=roots,
        code=code_of(roots),
        functions={reference: code.digest for reference, code in stage.user_code(arguments).items()},
        key=key,
        arguments={name: TypeAdapter(hints[name]).dump_python(value, mode="json") for name, value in arguments.items()},
    )


def arguments_of(call: StageCall, stage: Stage) -> dict[str, Any]:
    """Validate a call's arguments; pydantic.ValidationError for any that the stage does not take."""
    hints = _hints(stage.function)
    return {name: TypeAdapter(hints[name]).validate_json(json.dumps(value)) for name, value in call.arguments.items()}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    return {name: hints[name] for name in inspect.signature(function).parameters}


def code_of(roots: tuple[str, ...]) -> str:
    """Return a digest of the code that the roots reach here and of the versions of the libraries."""
    try:
        fingerprint = code_fingerprint(roots)
    except ValueError:
        # This checkout lacks a module that the caller has.
        fingerprint = "none"
    return hashlib.sha256(json.dumps([fingerprint, library_versions()]).encode()).hexdigest()


def carry_out(call: StageCall) -> StageOutcome:
    """Run the stage in this process, and record it under the call's key; an error is an outcome too."""
    # Prefect takes seconds to import, and some commands need only the names of this module.
    from tasks.storage.prefect_results import record_stage

    store = open_store_elsewhere(call.storage, call.run)
    use_store(store)
    try:
        code = code_of(call.roots)
        if call.code != code:
            hint = (
                "This worker runs other code or other versions of the libraries than the training; bring its checkout "
                "and its packages to the same state, and start it again."
            )
            raise InputError("worker", code[:12], hint)
        stage = stage_named(call.stage)
        _require_same_functions(call)
        store.requested = call_file(call.digest) if call.key else None
        reference = _made(stage, arguments_of(call, stage), store)
        if call.key is not None:
            record_stage(store, call.key, reference)
            remove_call(store, call.digest)
    except Exception as error:
        return StageOutcome(error=record_of(error), reasons=tuple(store.reasons))
    return StageOutcome(made=reference, reasons=tuple(store.reasons))


def _require_same_functions(call: StageCall) -> None:
    """Refuse a user's function whose code is not that of the call's key."""
    for reference, digest in call.functions.items():
        with contextlib.suppress(OSError):
            if (found := follow_code(reference).digest) != digest:
                hint = (
                    f"Its code here ({found[:12]}) is not the run's ({digest[:12]}): a file that it imports is another "
                    "one, or has changed since the run began. Bring them to the same state, and start both again."
                )
                raise InputError("worker", reference, hint)


def _made(stage: Stage, arguments: dict[str, Any], store: ArtifactStore) -> Reference:
    """Run a stage's function; rollouts in the process of a device if there are any, as the update that follows."""
    if stage.kind == "rollouts" and stage.uses_policy(arguments) and arguments["placement"].in_processes:
        return run_on_device(stage, arguments, None, store)
    return stage.function(**arguments)


def run_on_device(stage: Stage, arguments: Arguments, timeout: float | None, store: ArtifactStore) -> Reference:
    """Run the stage in the process of a device, as soon as one is free; raises what run_in_child raises."""
    section = arguments.get("section")
    label = " ".join(filter(None, [stage.name, section and section.label]))
    with resource(DeviceProcesses).borrow(arguments["placement"], label) as device:
        call = call_of(stage, {**arguments, "placement": arguments["placement"].on(device.device)}, store)
        return run_in_child(device.process, call, timeout, store, label)


def run_in_child(
    process: ChildProcess, call: StageCall, timeout: float | None, store: ArtifactStore, label: str | None = None
) -> Reference:
    """Run a stage of this process's run in a child.

    Raises:
        Exception: what the stage raised.
        LostStageError, StageTimeoutError, StageCancelledError: as ChildProcess.request.
    """
    try:
        outcome = carry_out_in(process, call, timeout, label)
    except (LostStageError, StageCancelledError, StageTimeoutError):
        store.clear_abandoned()
        raise
    store.reasons.extend(outcome.reasons)
    return outcome.reference()


def stage_handler() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Import every stage, and return what runs the calls of a parent process."""
    for name in STAGES:
        stage_named(name)
    return lambda payload: carry_out(StageCall.model_validate_json(json.dumps(payload))).model_dump(mode="json")


def carry_out_in(
    process: ChildProcess, call: StageCall, timeout: float | None, label: str | None = None
) -> StageOutcome:
    """Run the stage in a child that handles stages; raises what ChildProcess.request raises."""
    with naming_timeout(call.stage, call.arguments):
        answer = process.request(label or call.stage, call.model_dump(mode="json"), timeout, listener())
    outcome = StageOutcome.model_validate_json(json.dumps(answer))
    if outcome.error is not None:
        process.failure(outcome.error)
    return outcome


@contextlib.contextmanager
def naming_timeout(stage: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Add to a StageTimeoutError which stage ran into its timeout, which reward it computes, and the setting.

    Args:
        arguments: those of a call.
    """
    try:
        yield
    except StageTimeoutError as error:
        section = arguments.get("section", {})
        title = " ".join(filter(None, [stage, section.get("name") or section.get("reward")]))
        setting = f"placement.{stage_named(stage).kind}.timeout"
        raise StageTimeoutError(f"{title}: {error}; raise {setting}, or give the stage less to do") from error


def call_file(name: str) -> str:
    """Return where the call of this digest is kept in its run."""
    return f"{CALLS}/{name}.json"


def read_call(store: ArtifactStore, name: str) -> StageCall:
    """Read a call from the run's folder.

    Raises:
        ValueError: it is missing or damaged.
    """
    content = store.read_file(call_file(name))
    if content is None:
        raise ValueError(f"{store.run} has no call {name[:12]}; it was answered or withdrawn, or the run was pruned")
    try:
        call = StageCall.model_validate_json(json.dumps(load_checked(content)))
    except ValueError as error:
        raise ValueError(f"the call {name[:12]} of {store.run} is damaged ({error})") from error
    if call.digest != name:
        raise ValueError(f"the call {name[:12]} of {store.run} is damaged (its digest is {call.digest[:12]})")
    return call


def write_call(store: ArtifactStore, call: StageCall) -> None:
    """Write a call to the run's folder."""
    store.write_file(call_file(call.digest), dump_checked(call.model_dump(mode="json")))


def remove_call(store: ArtifactStore, name: str) -> None:
    """Remove a call whose stage is recorded or has failed."""
    with contextlib.suppress(FileNotFoundError):
        store.filesystem.rm_file(store.path(call_file(name)))


def clear_calls(store: ArtifactStore) -> None:
    """Withdraw every call of the run; a worker that is running one of them commits nothing."""
    remove_folder(store.filesystem, store.path(CALLS))
