"""Stages as flows: what a worker of a pool does when a run sends it one. Each is deployed once for every pool."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from prefect import Flow, flow

from tasks.execution.call import StageOutcome
from tasks.execution.child_process import StageProcess
from tasks.execution.error_records import record_of
from tasks.execution.faults import Fault, LostStageError, StageCancelledError, StageTimeoutError
from tasks.execution.pool import leave_outcome, read_call
from tasks.execution.stages import STAGES
from tasks.progress import listener
from tasks.storage.artifacts.store import ArtifactStore

PROCESS = StageProcess()
"""Of this worker: it keeps its model from one stage to the next."""


async def carry_out_call(root: str, run: str, call: str, timeout: float | None = None) -> None:
    """Do the stage that a run has left a call for, and leave what came of it beside the call.

    Args:
        root: where runs are kept.
        run: that asks.
        call: digest of what it asks, a file in the run's folder.
        timeout: seconds that it may take.

    Raises:
        Exception: whatever the stage raised, told to the run as well.
    """
    store = ArtifactStore(root, run)
    requested = read_call(store, call)
    try:
        outcome = await asyncio.to_thread(PROCESS.carry_out, requested, timeout, listener())
    except asyncio.CancelledError:
        # The thread that listens cannot be cancelled; it ends with the child.
        PROCESS.end()
        raise
    except StageCancelledError:
        # Nobody waits for an outcome.
        store.clear_abandoned()
        raise
    except (LostStageError, StageTimeoutError) as error:
        store.clear_abandoned()
        fault = Fault.LOST if isinstance(error, LostStageError) else Fault.TIMEOUT
        outcome = StageOutcome(error=record_of(error, time.time()), fault=fault.value)
    leave_outcome(store, call, outcome)
    outcome.reference()


def stage_flow(name: str) -> Flow[..., Coroutine[Any, Any, None]]:
    """The flow of one stage."""
    named = flow(name=name, description=f"The stage `{name}` of a run, for the workers of a pool.")
    return named(carry_out_call)


STAGE_FLOWS = {name: stage_flow(name) for name in STAGES}
