"""Where a stage runs: in this process, in a child that can be killed, by the workers of a pool, or in shards."""

import contextlib
import threading
from collections.abc import Callable

from prefect.futures import PrefectFuture
from prefect.transactions import CommitMode, get_transaction, transaction

from tasks.execution.call import Arguments, Part, Reference, Stage, StageOutcome, call_of, carry_out_in
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import (
    LostStageError,
    RetriesExhaustedError,
    StageCancelledError,
    StageTimeoutError,
    retryable_kind,
)
from tasks.execution.resources import resource
from tasks.execution.stopping import stages_cancelled_on_interrupt
from tasks.execution.work_pool import carry_out_on_pool
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, current_store

Submit = Callable[[Part], PrefectFuture[Reference]]


class _PolicyLock:
    """Held by the stage that uses this process's policy: each brings its weights to the version that it needs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def dispatch(stage: Stage, arguments: Arguments, submit: Submit) -> Reference:
    """Run the stage where its placement, one of the arguments, says; `submit` starts the stage's task on a part.

    Raises:
        Exception: whatever the stage raises, wherever it ran.
        StageTimeoutError: it ran into its timeout.
        LostStageError: the process or the worker that ran it has died.
        StageCancelledError: it was cancelled.
    """
    where, store = stage.where(arguments), current_store()
    # Another process would not know that the artifact may exist.
    store.require_read()
    if stage.shards(arguments) > 1:
        return run_in_shards(stage, arguments, submit)
    if where.pool is not None:
        task = get_transaction()
        assert task is not None, "a stage is a Prefect task, whose transaction has the stage's key"
        return carry_out_on_pool(call_of(stage, arguments, store, task.key), where.pool, where.timeout, store)
    if where.timeout is not None:
        outcome = _run_in_child(stage, arguments, where.timeout, store)
        store.reasons.extend(outcome.reasons)
        return outcome.reference()
    with resource(_PolicyLock).lock if stage.uses_policy(arguments) else contextlib.nullcontext():
        return stage.function(**arguments)


def _run_in_child(stage: Stage, arguments: Arguments, timeout: float, store: ArtifactStore) -> StageOutcome:
    call = call_of(stage, arguments, store)
    # Rollouts and updates share a child, and so its model, as long as they take turns.
    group = "policy" if stage.uses_policy(arguments) else f"{call.stage} {call.arguments.get('section')}"
    with resource(ChildProcesses).borrow(group, call.stage, child_command("stage")) as process:
        try:
            return carry_out_in(process, call, timeout)
        except (LostStageError, StageCancelledError, StageTimeoutError):
            store.clear_abandoned()
            raise


def run_in_shards(stage: Stage, arguments: Arguments, submit: Submit) -> Reference:
    """Cut the stage, run the parts concurrently as stages with their own records, and join them in order.

    Parts that succeed are kept when another one fails.

    Raises:
        RetriesExhaustedError: the first part that failed met a retryable error more often than it is retried.
        Exception: what the first part that failed raised otherwise; both once the other parts have ended.
    """
    assert stage.sharding is not None, "only a stage with sharding is cut"
    parts = stage.sharding.cut(arguments, stage.shards(arguments))
    # Each part is recorded when it ends; inside the stage's own task Prefect would record it at the end of that task.
    with transaction(commit_mode=CommitMode.EAGER):
        futures = [submit(part) for part in parts]
    with stages_cancelled_on_interrupt():
        for future in futures:
            future.wait()
    made = [_result(future) for future in futures]
    return stage.sharding.join(arguments, [part for part in made if isinstance(part, ArtifactRef)])


def _result(part: PrefectFuture[Reference]) -> Reference:
    try:
        return part.result()
    except Exception as error:
        if retryable_kind(error) is None:
            raise
        raise RetriesExhaustedError(f"{type(error).__name__}: {error}") from error
