"""Stages as flows: what a worker runs when a run sends it a stage. Each is deployed once per pool."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from prefect import Flow, flow

from flows.pipeline.flow_run_page import shown_in_ui
from tasks.execution.call import StageOutcome, carry_out_in, leave_outcome, read_call
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import LostStageError, StageCancelledError, StageTimeoutError, record_of
from tasks.execution.resources import resource
from tasks.execution.stages import STAGES
from tasks.storage.artifacts.store import ArtifactStore


async def carry_out_call(root: str, run: str, call: str, timeout: float | None = None) -> None:
    """Run the stage of a call, given by its digest, in a run's folder, and write the outcome next to the call.

    Raises:
        Exception: whatever the stage raised, which is in the outcome as well.
    """
    store = ArtifactStore(root, run)
    requested = read_call(store, call)
    try:
        # A worker runs one stage at a time, so this child is the only one, and keeps its model.
        with (
            shown_in_ui(run),
            resource(ChildProcesses).borrow("stage", requested.stage, child_command("stage")) as child,
        ):
            try:
                outcome = await asyncio.to_thread(carry_out_in, child, requested, timeout)
            except asyncio.CancelledError:
                # The thread cannot be cancelled; it ends with the child.
                child.end()
                raise
    except StageCancelledError:
        # No run waits for the outcome.
        store.clear_abandoned()
        raise
    except (LostStageError, StageTimeoutError) as error:
        store.clear_abandoned()
        outcome = StageOutcome(error=record_of(error))
    leave_outcome(store, call, outcome)
    outcome.reference()


STAGE_FLOWS: Mapping[str, Flow[..., Coroutine[Any, Any, None]]] = {
    name: flow(name=name, description=f"The stage `{name}` of a run, for the workers of a pool.")(carry_out_call)
    for name in STAGES
}
