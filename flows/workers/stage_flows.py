"""Stages as flows: what a worker runs when a run sends it a stage. Each is deployed once per pool."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from prefect import Flow, flow

from tasks.execution.call import StageOutcome, carry_out_in
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess
from tasks.execution.errors import LostStageError, StageCancelledError, StageTimeoutError, record_of
from tasks.execution.pool import leave_outcome, read_call
from tasks.execution.resources import resource
from tasks.execution.stages import STAGES
from tasks.storage.artifacts.store import ArtifactStore


class StageChild(ChildProcess):
    """The one child of a worker; it keeps its model from one stage to the next."""

    def __init__(self) -> None:
        super().__init__(child_command("stage"))

    def close(self) -> None:
        """Kill the child."""
        self.end()


async def carry_out_call(root: str, run: str, call: str, timeout: float | None = None) -> None:
    """Run the stage of a call in a run's folder, and write the outcome next to the call.

    Args:
        root: where runs are stored.
        run: name of the run that requests it.
        call: the call's digest.
        timeout: seconds that the stage may take; None for no limit.

    Raises:
        Exception: whatever the stage raised, which is in the outcome as well.
    """
    store, child = ArtifactStore(root, run), resource(StageChild)
    requested = read_call(store, call)
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


def stage_flow(name: str) -> Flow[..., Coroutine[Any, Any, None]]:
    """Return the flow of one stage."""
    named = flow(name=name, description=f"The stage `{name}` of a run, for the workers of a pool.")
    return named(carry_out_call)


STAGE_FLOWS = {name: stage_flow(name) for name in STAGES}
