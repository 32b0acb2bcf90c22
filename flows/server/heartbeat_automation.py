"""The automation that marks a run as crashed when its heartbeats stop."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

NAME = "grpo: runs without heartbeats have crashed"

HEARTBEAT_TIMEOUT = timedelta(seconds=75)
"""Two and a half heartbeats of 30 s, the interval that flows.prefect_settings sets."""

FLOWS = ("grpo *", "collect rollouts", "score reward", "compute advantages", "update policy")
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


async def ensure_automations(client: "PrefectClient") -> bool:
    """Register the automation, or update the one that differs; one that was disabled stays disabled.

    Returns:
        Whether anything was changed.
    """
    wanted = heartbeat_automation()
    found = await client.read_automations_by_name(NAME)
    if not found:
        await client.create_automation(wanted)
        return True
    kept, *twins = found
    for twin in twins:
        await client.delete_automation(twin.id)
    compared = {"trigger", "actions", "description"}
    same = _plain(kept, compared) == _plain(wanted, compared)
    if not same:
        await client.update_automation(kept.id, wanted.model_copy(update={"enabled": kept.enabled}))
    return bool(twins) or not same


def _plain(automation: AutomationCore, fields: set[str]) -> object:
    def ordered(value: object) -> object:
        if isinstance(value, dict):
            return {key: ordered(each) for key, each in value.items() if key not in ("id", "owner_resource")}
        # Sets come in any order.
        return sorted(map(repr, map(ordered, value))) if isinstance(value, list) else value

    return ordered(automation.model_dump(mode="json", include=fields))


async def extend_deadline() -> None:
    """Give every run a new deadline, since no heartbeat could arrive while the server was down.

    Called by the server before it starts, once its tables are up to date. Otherwise a server that was down for longer
    than the deadline would mark all live runs as crashed.
    """
    import sqlalchemy as sa
    from prefect.server.database import provide_database_interface

    db = provide_database_interface()
    deadline = datetime.now(UTC) + HEARTBEAT_TIMEOUT
    ours = sa.select(db.Automation.id).where(db.Automation.name == NAME).scalar_subquery()
    extended = (
        sa.update(db.AutomationBucket)
        .where(db.AutomationBucket.automation_id.in_(ours), db.AutomationBucket.end < deadline)
        .values(end=deadline)
    )
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(extended)
