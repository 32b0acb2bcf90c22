"""A stage with its arguments as JSON, for another process or machine, and its outcome.

A call for another machine is a file in the run's folder until the stage is recorded there, or the call is withdrawn.
"""

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from configs.placement import StorageSection
from grpo_core.errors import InputError
from grpo_core.user_code.files import follow_code
from tasks.execution.child_process import ChildProcess
from tasks.execution.devices import DeviceProcesses
from tasks.execution.errors import ErrorRecord, LostStageError, StageCancelledError, StageTimeoutError, record_of
from tasks.execution.fingerprint import code_fingerprint, library_versions
from tasks.execution.resources import resource
from tasks.execution.stage import STAGES, Arguments, Device, Reference, Stage, place, stage_named
from tasks.progress import listener
from tasks.storage.artifacts.store import ArtifactStore, described, open_store_elsewhere, use_store
from tasks.storage.files import dump_checked, load_checked, remove_folder

CALLS = ".calls"  # folder of a run for the calls of its stages to other machines


class StageCall(BaseModel):
    """A stage to be run elsewhere, on artifacts of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    storage: StorageSection  # the root as every machine of the run finds it, and the folder for copies of what is read
    run: str
    roots: tuple[str, ...]  # where the stage's code begins
    code: str  # digest of that code and of the libraries' versions, which the worker must have too
    arguments: dict[str, Any]
    functions: dict[str, str] = {}  # digest of each of the user's functions, by its reference, which it must have too
    # Of the stage's record, which another machine writes; it commits nothing once the run has withdrawn the call by
    # removing its file. None for a child of the run.
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
        """Return what the stage made, or raise the error that it failed with."""
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
            hint = "It runs other code or other versions of libraries than the training; bring both to the same state."
            raise InputError("worker", code[:12], hint)
        stage = stage_named(call.stage)
        _require_same_functions(call)
        store.requested = call_file(call.digest) if call.key else None
        arguments = arguments_of(call, stage)
        if isinstance(place(stage, arguments, on_worker=True), Device):
            reference = run_on_device(stage, arguments, None, store)
        else:
            reference = stage.function(**arguments)
        if call.key is not None:
            record_stage(store, call.key, reference)
            remove_call(store, call.digest)
    except Exception as error:
        return StageOutcome(error=record_of(error), reasons=tuple(store.reasons))
    return StageOutcome(made=reference, reasons=tuple(store.reasons))


def _require_same_functions(call: StageCall) -> None:
    for reference, digest in call.functions.items():
        with contextlib.suppress(OSError):
            if (found := follow_code(reference).digest) != digest:
                what = f"Its code here ({found[:12]}) is not the run's ({digest[:12]}), or has changed since it began"
                raise InputError("worker", reference, f"{what}. Bring them to the same state, and start both again.")


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
    """Run a stage of this process's run in a child; raises what the stage and ChildProcess.request raise."""
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
    """Add to a StageTimeoutError the stage, the reward that it computes, and the setting."""
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
    """Read a call from the run's folder; ValueError if it is missing or damaged."""
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
