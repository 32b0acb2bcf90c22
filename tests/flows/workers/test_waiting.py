"""A run that waits for a pool says what keeps its workers from the work."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun

from flows.workers.worker import KIND, STAGES_QUEUE, register_stages
from tasks.execution.cancellation import StopSignals
from tasks.execution.errors import StageCancelledError
from tasks.execution.pool_run import follow
from tasks.execution.resources import resource, run_resources
from tasks.progress import listen
from tests.flows.conftest import Heard

POOL = "waited-for"
SECONDS_TO_TELL = 30.0


async def _asked_of_the_pool() -> FlowRun:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type=KIND))
        await register_stages(client, POOL)
        deployment = await client.read_deployment_by_name(f"score reward/{POOL}")
        return await client.create_flow_run_from_deployment(
            deployment.id, parameters={"root": "r", "run": "r", "call": "c"}
        )


async def _pause(*, pool: bool, queue: bool) -> None:
    async with get_client() as client:
        await client.update_work_pool(POOL, WorkPoolUpdate(is_paused=pool))
        found = await client.read_work_queue_by_name(STAGES_QUEUE, work_pool_name=POOL)
        await client.update_work_queue(found.id, is_paused=queue)


@pytest.fixture
def heard(server: None) -> Iterator[Heard]:
    """What is told by one that waits for a stage that nobody takes."""
    flow_run, heard = asyncio.run(_asked_of_the_pool()), Heard([], [])

    def wait() -> None:
        listen(heard)
        with pytest.raises(StageCancelledError):
            follow(flow_run, POOL, None, has_outcome=lambda: False)

    with run_resources():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(wait,), daemon=True)
        thread.start()
        yield heard
        resource(StopSignals).cancelled.set()
        thread.join()


def test_what_keeps_workers_from_it_is_told_once_each(heard: Heard) -> None:
    reasons = (
        (False, False, f"none is online; start `grpo worker {POOL}`"),
        (True, False, f"the pool is paused; `prefect work-pool resume {POOL}`"),
        (False, True, f"its queue is paused; `prefect work-queue resume {STAGES_QUEUE} --pool {POOL}`"),
    )
    for number, (pool, queue, told) in enumerate(reasons, start=1):
        asyncio.run(_pause(pool=pool, queue=queue))
        limit = time.monotonic() + SECONDS_TO_TELL
        while len(heard.lines) < number and time.monotonic() < limit:
            time.sleep(0.1)
        assert heard.lines[number - 1 :] == [f"waiting for a worker of pool {POOL}: {told}"]
