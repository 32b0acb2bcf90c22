"""Send a stage to a work pool: a call in the run's folder, a flow run that points at it, an outcome in the folder.

Only the name of the call goes through the server, which refuses parameters over 512 KiB.
"""

import contextlib
import itertools
import json
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, TaskRun, TaskRunResult
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from grpo_core.errors import InputError
from tasks.execution.call import CALLS, StageCall, StageOutcome, call_file
from tasks.execution.errors import LostStageError
from tasks.execution.pool_run import follow, is_final
from tasks.execution.stages import Reference
from tasks.progress import log
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.files import dump_checked, load_checked


def carry_out_on_pool(call: StageCall, pool: str, timeout: float | None, store: ArtifactStore) -> Reference:
    """Have a worker of the pool run the stage, and wait for it.

    A run that was killed while it waited finds the result of the worker at its next start, or waits for it again.

    Args:
        call: the stage.
        pool: name of the work pool.
        timeout: seconds that the stage may take once a worker has begun it; None for no limit.
        store: the run.

    Raises:
        InputError: no worker has ever served this stage for the pool.
        Exception: whatever the stage raised.
        LostStageError: its worker has died.
    """
    name = call.digest
    done = _finished_before(store, name)
    if done is None:
        store.write_file(call_file(name), dump_checked(call.model_dump(mode="json")))
        with get_client(sync_client=True) as client:
            flow_run = _flow_run(client, call, pool, timeout)
        follow(flow_run, pool, timeout, has_outcome=lambda: _has_outcome(store, name))
        done = read_outcome(store, name)
    if done is None:
        raise LostStageError(
            f"{call.stage}: a worker of pool {pool} left no outcome; its log says why, and whether it can reach "
            f"{call.storage.root} at all"
        )
    _forget(store, name)
    store.reasons.extend(done.reasons)
    return done.reference()


def _finished_before(store: ArtifactStore, name: str) -> StageOutcome | None:
    """Return the outcome of a call of an earlier start of this run; errors are dropped."""
    outcome = read_outcome(store, name)
    if outcome is None or outcome.error is not None:
        # The call stays: a worker may be running it, and commits nothing for one that was withdrawn.
        _remove(store, _outcome_file(name))
        return None
    reference = outcome.reference()
    artifact = reference if isinstance(reference, ArtifactRef) else reference.checkpoint
    assert artifact is not None, "a stage makes an artifact"
    try:
        store.restore_artifact(artifact)
    except StaleReferenceError:
        _forget(store, name)
        return None
    return outcome


def _flow_run(client: SyncPrefectClient, call: StageCall, pool: str, timeout: float | None) -> FlowRun:
    """Create a flow run of the call, or return the unfinished one that an earlier start of this run created."""
    context = TaskRunContext.get()
    stage = context.task_run.name if context else call.stage
    parameters: dict[str, Any] = {
        "root": call.storage.root,
        "run": call.run,
        "call": call.digest,
        "timeout": timeout,
    }
    try:
        deployment = client.read_deployment_by_name(f"{call.stage}/{pool}")
    except ObjectNotFound as error:
        hint = f"No worker has served it. Start one with `grpo worker {pool}`; it makes the pool and its deployments."
        raise InputError("placement pool", pool, hint) from error
    title = f"{stage} on {pool}"
    link = _link(client, context, title, call) if context else None
    for attempt in itertools.count(1):
        flow_run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters=parameters,
            state=Scheduled(),
            name=title,
            tags=[call.run, pool],
            idempotency_key=f"{call.digest}-{attempt}",
            parent_task_run_id=link.id if link else None,
        )
        if not is_final(flow_run) and not (flow_run.state and flow_run.state.is_cancelling()):
            if link is not None and flow_run.parent_task_run_id != link.id:
                client.delete_task_run(link.id)
            log(f"{stage}: sent to pool {pool}")
            return flow_run
    raise AssertionError("attempts have no end")


def _link(client: SyncPrefectClient, stage: TaskRunContext, title: str, call: StageCall) -> TaskRun:
    """Create a task run that shows the flow run on the page of the run that requested it.

    The parent of a flow run must be a task run that the server knows; it does not know the stage's own yet.
    """
    return client.create_task_run(
        stage.task,
        flow_run_id=stage.task_run.flow_run_id,
        dynamic_key=f"{call.digest}-{stage.task_run.run_count}",
        name=title,
        task_inputs={"__parents__": [TaskRunResult(id=stage.task_run.id)]},
    )


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


def leave_outcome(store: ArtifactStore, name: str, outcome: StageOutcome) -> None:
    """Write a call's outcome to the run's folder, unless the call was withdrawn."""
    if store.read_file(call_file(name)) is not None:
        store.write_file(_outcome_file(name), dump_checked(outcome.model_dump(mode="json")))


def read_outcome(store: ArtifactStore, name: str) -> StageOutcome | None:
    """Read a call's outcome; None if it is missing or damaged."""
    content = store.read_file(_outcome_file(name))
    if content is None:
        return None
    try:
        return StageOutcome.model_validate_json(json.dumps(load_checked(content)))
    except ValueError:
        return None


def _has_outcome(store: ArtifactStore, name: str) -> bool:
    return store.read_file(_outcome_file(name)) is not None


def _forget(store: ArtifactStore, name: str) -> None:
    for file in (call_file(name), _outcome_file(name)):
        _remove(store, file)


def _remove(store: ArtifactStore, file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.filesystem.rm_file(store.path(file))


def clear_calls(store: ArtifactStore) -> None:
    """Withdraw every call of the run; a worker that is running one of them commits nothing."""
    folder = store.path(CALLS)
    if store.filesystem.exists(folder):
        store.filesystem.rm(folder, recursive=True)


def _outcome_file(name: str) -> str:
    return f"{CALLS}/{name}.outcome.json"
