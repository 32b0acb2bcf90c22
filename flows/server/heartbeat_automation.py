"""The automation that marks a run as crashed when its heartbeats stop."""

from datetime import timedelta
from typing import TYPE_CHECKING

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import PrefectHTTPStatusError

from flows.server.reachable import is_cloud
from tasks.execution.stage import STAGES

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

NAME = "grpo: runs without heartbeats have crashed"

HEARTBEAT_TIMEOUT = timedelta(minutes=5)
"""Ten heartbeats of 30 s, the interval that flows.server.prefect_settings sets.

No heartbeat arrives while the server is down: if that is for longer, living runs are marked as crashed too.
"""

FLOWS = ("grpo *", *STAGES)
"""Runs, and stages on workers. Other projects' flows on the same server may have longer intervals."""

_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended", "AwaitingRetry", "Rescheduled")


def heartbeat_automation() -> AutomationCore:
    """Build the automation: after a heartbeat another one must follow, or the end of the run."""
    trigger = EventTrigger(
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _ENDS)},
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=HEARTBEAT_TIMEOUT,
    )
    message = f"no heartbeat for {HEARTBEAT_TIMEOUT.seconds} s; start the run again to resume from its last artifact"
    return AutomationCore(
        name=NAME,
        description="A flow run whose process or machine died is marked as crashed.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


async def ensure_automation(client: "PrefectClient") -> bool:
    """Register the automation unless there is one of this name; return false where Prefect Cloud's plan refuses it."""
    try:
        if not await client.read_automations_by_name(NAME):
            await client.create_automation(heartbeat_automation())
    except PrefectHTTPStatusError:
        if not is_cloud():
            raise
        return False
    return True
