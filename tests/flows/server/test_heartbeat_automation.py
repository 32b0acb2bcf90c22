"""The automation that marks silent runs as crashed: registered once, kept as it should be."""

import asyncio
import re
from fnmatch import fnmatchcase

import pytest
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import Automation

from flows.server.heartbeat_automation import FLOWS, NAME, ensure_automation, heartbeat_automation
from tasks.execution.stage import STAGES
from tests.flows.conftest import REPOSITORY


def test_it_is_about_every_flow_of_ours_and_no_other() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "flows").rglob("*.py")]
    named = {*STAGES, *(name for source in sources for name in re.findall(r'@flow\(\s*name="([^"]+)"', source))}
    # Made by hand, on no server.
    named -= {"tiny model", "tiny text model", "tiny sd3"}
    assert {"grpo train", "grpo replay", "collect rollouts"} <= named
    assert [name for name in named if not any(fnmatchcase(name, pattern) for pattern in FLOWS)] == []
    assert not any(fnmatchcase("nightly report", pattern) for pattern in FLOWS)


async def registered() -> list[Automation]:
    async with get_client() as client:
        return await client.read_automations_by_name(NAME)


@pytest.mark.usefixtures("server")
def test_it_is_registered_once_and_stays_as_a_person_left_it() -> None:
    async def go() -> None:
        async with get_client() as client:
            # Deployments of other tests of this server register it as well.
            for each in await registered():
                await client.delete_automation(each.id)
            assert await ensure_automation(client)
            (first,) = await registered()
            changed = {"description": "another", "enabled": False}
            await client.update_automation(first.id, heartbeat_automation().model_copy(update=changed))
            assert await ensure_automation(client)
            (kept,) = await registered()
            assert (kept.id, kept.description, kept.enabled) == (first.id, "another", False)

    asyncio.run(go())
