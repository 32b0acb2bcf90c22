"""The automation that marks silent runs as crashed: registered once, kept as it should be, patient after a restart."""

import asyncio
import importlib
import pkgutil
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import Automation

from flows.server.heartbeat_automation import (
    HEARTBEAT_TIMEOUT,
    NAME,
    ensure_automations,
    extend_deadline,
    heartbeat_automation,
)
from flows.workers.stage_flows import STAGE_FLOWS
from tests.flows.server.conftest import server_of


def test_it_is_about_every_flow_of_ours_and_no_other() -> None:
    import flows
    from flows.server.heartbeat_automation import FLOWS

    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(flows.__path__, "flows.")]
    named = {value.name for module in modules for value in vars(module).values() if isinstance(value, Flow)}
    named |= set(STAGE_FLOWS)
    # Made by hand, on no server.
    named -= {"tiny model", "tiny text model", "tiny sd3"}
    assert {"grpo train", "grpo replay", "collect rollouts"} <= named
    assert [name for name in named if not any(fnmatchcase(name, pattern) for pattern in FLOWS)] == []
    assert not any(fnmatchcase("nightly report", pattern) for pattern in FLOWS)


async def registered() -> list[Automation]:
    async with get_client() as client:
        return await client.read_automations_by_name(NAME)


async def ensure() -> bool:
    async with get_client() as client:
        return await ensure_automations(client)


@pytest.mark.usefixtures("server")
def test_it_is_registered_once_and_brought_up_to_date_where_it_differs() -> None:
    async def go() -> None:
        # Deployments of other tests of this server register it as well.
        async with get_client() as client:
            for each in await registered():
                await client.delete_automation(each.id)
        assert await ensure()
        (first,) = await registered()
        assert not await ensure()
        async with get_client() as client:
            other = heartbeat_automation().model_copy(update={"description": "another", "enabled": False})
            await client.update_automation(first.id, other)
            await client.create_automation(heartbeat_automation())
        assert len(await registered()) == 2
        assert await ensure()
        (kept,) = await registered()
        assert kept.description == heartbeat_automation().description
        assert not await ensure()

    asyncio.run(go())


@pytest.mark.usefixtures("server")
def test_whoever_switched_it_off_keeps_it_off() -> None:
    async def go() -> None:
        await ensure()
        (first,) = await registered()
        async with get_client() as client:
            await client.pause_automation(first.id)
            changed = heartbeat_automation().model_copy(update={"description": "another", "enabled": False})
            await client.update_automation(first.id, changed)
        assert await ensure()
        (kept,) = await registered()
        assert not kept.enabled
        assert kept.description == heartbeat_automation().description

    asyncio.run(go())


# Prefect's own column types, told by SQLAlchemy 2.1.
@pytest.mark.filterwarnings("ignore:Type object:sqlalchemy.exc.SADeprecationWarning")
def test_after_a_restart_silence_counts_from_then_on(tmp_path: Path) -> None:
    async def go() -> dict[str, datetime]:
        from prefect.server.database import provide_database_interface

        db = provide_database_interface()
        # These tables alone: all migrations, one after another, take seconds.
        engine, tables = await db.engine(), [db.Automation.__table__, db.AutomationBucket.__table__]
        async with engine.begin() as connection:
            await connection.run_sync(db.Base.metadata.create_all, tables=tables)
        now = datetime.now(UTC)
        async with db.session_context(begin_transaction=True) as session:
            for name in (NAME, "another's"):
                automation = heartbeat_automation().model_dump(mode="json", exclude={"name", "owner_resource"})
                row = {
                    "id": uuid4(),
                    "name": name,
                    "enabled": True,
                    "description": "",
                    "trigger": automation["trigger"],
                }
                await session.execute(sa.insert(db.Automation).values(**row, actions=[], tags=[]))
                ended = {"start": now - timedelta(minutes=9), "end": now - timedelta(minutes=8), "count": 0}
                bucket = {"automation_id": row["id"], "trigger_id": uuid4(), "bucketing_key": [name], **ended}
                await session.execute(sa.insert(db.AutomationBucket).values(**bucket))
        await extend_deadline()
        async with db.session_context() as session:
            rows = await session.execute(sa.select(db.AutomationBucket.bucketing_key, db.AutomationBucket.end))
            return {key[0]: end for key, end in rows}

    before = datetime.now(UTC)
    with server_of(f"sqlite+aiosqlite:///{tmp_path}/prefect.db"):
        ends = asyncio.run(go())
    assert before + HEARTBEAT_TIMEOUT <= ends[NAME] <= datetime.now(UTC) + HEARTBEAT_TIMEOUT
    assert ends["another's"] < before
