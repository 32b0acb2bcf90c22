"""Rollouts ahead of updates: a failure of one is told, whatever the other is waiting for."""

import asyncio
import contextvars
import threading

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate

from flows.workers.worker import KIND, register_stages
from grpo_core.parity import ParityError
from tests.flows.conftest import Runs

POOL = "nobody-works-here"
SECONDS_TO_FAIL = 60.0


async def _make_pool() -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type=KIND))
        await register_stages(client, POOL)


def test_a_failed_update_is_told_while_rollouts_wait_for_a_worker(empty: Runs) -> None:
    empty.start(run__staleness=1, run__iterations=1)
    asyncio.run(_make_pool())
    # Both iterations begin with version 0; the rollouts of the first are there, those of the second are nobody's.
    strict = {"update__parity__max_difference": 1e-30, "update__parity__mean_difference": 1e-30}
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            empty.start(run__staleness=1, run__iterations=2, placement__rollouts__pool=POOL, **strict)
        except ParityError as error:
            ended.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(SECONDS_TO_FAIL)
    assert len(ended) == 1
