"""The place where a stage is done."""

import contextlib
import threading

from tasks.execution.call import call_of
from tasks.execution.child_process import borrowed_process
from tasks.execution.faults import LostStageError, StageCancelledError, StageTimeoutError
from tasks.execution.pool import carry_out_on_pool
from tasks.execution.shards import Submit, in_shards
from tasks.execution.stages import Arguments, Reference, Stage
from tasks.progress import listener
from tasks.storage.artifacts.store import current_store

_POLICY_HERE = threading.Lock()


def dispatch(stage: Stage, arguments: Arguments, submit: Submit) -> Reference:
    """Do the stage where its placement says.

    Args:
        stage: what is done.
        arguments: of its function; among them the placement.
        submit: starts the stage's task on a part of it.

    Raises:
        Exception: whatever the stage raises, wherever it was done.
        StageTimeoutError: it was over its time.
        LostStageError: the process or the worker that did it is gone.
        StageGivenUpError: it was ended from here, or cancelled.
    """
    where, store = stage.where(arguments), current_store()
    # Whoever does it elsewhere would not know that it may have been done.
    store.require_read()
    if stage.shards(arguments) > 1:
        return in_shards(stage, arguments, submit)
    if where.pool is not None:
        call = call_of(stage, arguments, store, withdrawable=True)
        return carry_out_on_pool(call, where.pool, where.timeout, store)
    if where.timeout is not None:
        call = call_of(stage, arguments, store)
        with borrowed_process(call) as process:
            try:
                outcome = process.carry_out(call, where.timeout, listener())
            except (LostStageError, StageCancelledError, StageTimeoutError):
                store.clear_abandoned()
                raise
        store.reasons.extend(outcome.reasons)
        return outcome.reference()
    # Both take the weights that this process holds to the version they need.
    with _POLICY_HERE if stage.kind in ("rollouts", "update") else contextlib.nullcontext():
        return stage.function(**arguments)
