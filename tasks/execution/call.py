"""A stage and its arguments as JSON, so that another process or machine can do it, and what came of it."""

import hashlib
import inspect
import json
import time
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from configs.placement_sections import StorageSection
from grpo_core.errors import InputError
from tasks.execution.code_digest import code_digest
from tasks.execution.error_records import ErrorRecord, record_of
from tasks.execution.faults import Fault, RemoteStageError, fault_of
from tasks.execution.stages import Arguments, Reference, Stage, stage_named
from tasks.storage.artifacts.open_store import described, open_store_elsewhere
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, use_store

CALLS = ".calls"
"""Folder of a run for what its stages are asked on other machines, and for what they answer."""


def call_file(name: str) -> str:
    """Where the call of this digest lies in its run."""
    return f"{CALLS}/{name}.json"


class StageCall(BaseModel):
    """One stage to be done for a run.

    Attributes:
        stage: its name.
        storage: the root as any process of any machine of the run finds it, and the folder for copies of what is read.
        run: whose artifacts it reads and writes.
        code: digest of the code that asks; other code would make something else.
        arguments: of the stage's function, as JSON values.
        withdrawable: whether the run may take it back: it does by removing the call's file, and nothing is then made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    storage: StorageSection
    run: str
    code: str
    arguments: dict[str, Any]
    withdrawable: bool = False

    @property
    def digest(self) -> str:
        """Names the call: the same stage on the same inputs in the same place, wherever copies of these are kept."""
        named = self.model_dump(mode="json", exclude={"storage": {"cache_dir", "cache_gib"}})
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


class StageOutcome(BaseModel):
    """What came of a call: an artifact, a policy version, or an error.

    Attributes:
        artifact: that the stage made.
        policy: that the stage made.
        error: why it made neither.
        fault: the error's kind, if it may pass by itself.
        reasons: why files were set aside on the way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: ArtifactRef | None = None
    policy: PolicyRef | None = None
    error: ErrorRecord | None = None
    fault: str | None = None
    reasons: tuple[str, ...] = ()

    def reference(self) -> Reference:
        """What the stage made.

        Raises:
            Exception: the error that it failed with; one that cannot be rebuilt here as RemoteStageError.
        """
        if self.error is not None:
            fault = Fault(self.fault) if self.fault else None
            if self.error.known and fault is None:
                raise self.error.error()
            raise RemoteStageError(f"{self.error.kind}: {self.error.message}", self.error.trace, fault)
        reference = self.artifact or self.policy
        assert reference is not None, "an outcome holds an artifact, a policy or an error"
        return reference


def call_of(stage: Stage, arguments: Arguments, store: ArtifactStore, *, withdrawable: bool = False) -> StageCall:
    """The call that does the stage with these arguments elsewhere; on another machine it may be withdrawn."""
    hints = _hints(stage.function)
    return StageCall(
        stage=stage.name,
        storage=described(store),
        run=store.run,
        code=code_digest(),
        withdrawable=withdrawable,
        arguments={name: TypeAdapter(hints[name]).dump_python(value, mode="json") for name, value in arguments.items()},
    )


def arguments_of(call: StageCall, stage: Stage) -> dict[str, Any]:
    """The arguments again, validated.

    Raises:
        pydantic.ValidationError: they are not what the stage takes.
    """
    hints = _hints(stage.function)
    return {name: TypeAdapter(hints[name]).validate_json(json.dumps(value)) for name, value in call.arguments.items()}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    return {name: hints[name] for name in inspect.signature(function).parameters}


def carry_out(call: StageCall) -> StageOutcome:
    """Do the stage in this process; an error is an outcome too."""
    store = open_store_elsewhere(call.storage, call.run)
    use_store(store)
    try:
        if call.code != code_digest():
            hint = (
                "This worker runs other code or other versions of the libraries than the training; bring its checkout "
                "and its packages to the same state, and start it again."
            )
            raise InputError("worker", code_digest()[:12], hint)
        stage = stage_named(call.stage)
        store.requested = call_file(call.digest) if call.withdrawable else None
        reference = stage.function(**arguments_of(call, stage))
    except Exception as error:
        fault = fault_of(error)
        return StageOutcome(
            error=record_of(error, time.time()), fault=fault and fault.value, reasons=tuple(store.reasons)
        )
    if isinstance(reference, PolicyRef):
        return StageOutcome(policy=reference, reasons=tuple(store.reasons))
    return StageOutcome(artifact=reference, reasons=tuple(store.reasons))
