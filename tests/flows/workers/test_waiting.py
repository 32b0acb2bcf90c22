"""Runs that wait for workers of a pool: what they log, how they end, and what a worker does side by side."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.states import Failed

from configs.loader import read_config
from flows.server.reachable import KIND
from flows.worker import STAGES_QUEUE, WorkerState, register_stages, uses_the_gpu
from grpo_core.errors import NonFiniteError
from grpo_core.parity import ParityError
from tasks.execution import work_pool
from tasks.execution.call import StageCall, read_call, remove_call
from tasks.execution.errors import StageCancelledError, record_of
from tasks.execution.resources import resource, run_resources
from tasks.execution.stopping import StopSignals
from tasks.execution.work_pool import carry_out_on_pool, follow
from tasks.progress import listen
from tasks.runs.lookup import write_description
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, described
from tasks.storage.prefect_results import record_stage
from tasks.storage.schemas import SCHEMA_VERSION
from tests.flows.conftest import TINY, Heard, Runs

POOL = "waited-for"
SECONDS_TO_TELL = 30.0
DESERTED = "nobody-works-here"
SECONDS_TO_FAIL = 60.0


async def _make_pool(name: str) -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=name, type=KIND))
        await register_stages(client, name)


async def _asked_of_the_pool() -> FlowRun:
    await _make_pool(POOL)
    async with get_client() as client:
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
def heard(server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """What is told by one that waits for a stage that nobody takes."""
    monkeypatch.setattr(work_pool, "SECONDS_BETWEEN_CHECKS", 0.2)
    flow_run, heard = asyncio.run(_asked_of_the_pool()), Heard([], [])

    def wait() -> None:
        listen(heard)
        with pytest.raises(StageCancelledError):
            follow(flow_run, POOL, None, lambda: False)

    with run_resources():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(wait,), daemon=True)
        thread.start()
        yield heard
        resource(StopSignals).cancelled.set()
        thread.join()


@pytest.mark.parametrize(
    ("idle", "limit", "taken", "quiet", "busy", "ends"),
    [
        (None, None, 9, 1e6, False, False),
        (10.0, None, 0, 9.0, False, False),
        (10.0, None, 0, 11.0, False, True),
        (10.0, None, 0, 11.0, True, False),
        (None, 2, 1, 0.0, False, False),
        (None, 2, 2, 0.0, True, False),
        (None, 2, 2, 0.0, False, True),
    ],
)
def test_a_worker_ends_when_it_is_idle_or_has_done_its_share(
    idle: float | None, limit: int | None, taken: int, quiet: float, busy: bool, ends: bool
) -> None:
    shift = WorkerState(anyio.Lock(), idle, limit, taken, time.monotonic() - quiet)
    assert (shift.end(busy=busy) is not None) == ends
    assert shift.is_full() == (limit is not None and taken >= limit)


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


@pytest.mark.parametrize("answered", [False, True], ids=["its error", "the record of another worker"])
def test_a_stage_that_failed_on_its_worker_gives(server: None, tmp_path: Path, answered: bool) -> None:
    pool, store = f"failed-{answered}", ArtifactStore(str(tmp_path), "run")
    asyncio.run(_make_pool(pool))
    call = StageCall(
        stage="score reward", storage=described(store), run="run", roots=(), code="", arguments={}, key="key"
    )
    error, made = NonFiniteError("loss", ["s1"], "\x00 Lower it."), PolicyRef(version=0, digest="0" * 64)

    def fail() -> None:
        with get_client(sync_client=True) as client:
            wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[pool]))
            while not (found := client.read_flow_runs(flow_run_filter=wanted)):
                time.sleep(0.1)
            if answered:
                record_stage(store, "key", made)
                remove_call(store, call.digest)
            client.set_flow_run_state(found[0].id, Failed(message=record_of(error).state_message()), force=True)

    with run_resources(), ThreadPoolExecutor(1) as thread:
        failing = thread.submit(contextvars.copy_context().run, fail)
        if answered:
            assert carry_out_on_pool(call, pool, None, store) == made
        else:
            with pytest.raises(NonFiniteError) as caught:
                carry_out_on_pool(call, pool, None, store)
            assert caught.value.__reduce__()[1] == error.__reduce__()[1]
        failing.result()
    with pytest.raises(ValueError):  # noqa: PT011 - the call is removed
        read_call(store, call.digest)


@pytest.mark.slow
def test_a_failed_update_is_told_while_rollouts_wait_for_a_worker(empty: Runs) -> None:
    empty.start(run__staleness=1, run__iterations=1)
    asyncio.run(_make_pool(DESERTED))
    # Both iterations begin with version 0; the rollouts of the first are there, those of the second are nobody's.
    strict = {"update__parity__max_difference": 1e-30, "update__parity__mean_difference": 1e-30}
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            empty.start(run__staleness=1, run__iterations=2, placement__rollouts__pool=DESERTED, **strict)
        except ParityError as error:
            ended.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(SECONDS_TO_FAIL)
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"root": "runs", "run": "tiny", "call": "0" * 64}, True),
        ({"config": {"run": {"name": "tiny"}}}, True),
        (
            {"config": {"placement": {"rollouts": {"pool": None, "timeout": 60.0}}, "rewards": [{"reward": "ssim"}]}},
            True,
        ),
        ({"config": {"placement": {"update": {"pool": "gpu"}}}}, False),
        ({"config": {"rewards": [{"reward": "ssim"}, {"reward": "psnr", "pool": "cpu"}]}}, False),
        ({"request": {"run": "nowhere"}}, False),
        ({"request": {"sources": ["tiny"], "rewards": "rewards.yaml", "name": "again"}}, False),
    ],
)
def test_what_has_a_machine_to_itself(parameters: dict[str, Any], expected: bool) -> None:
    assert uses_the_gpu(parameters) is expected


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ([], [], True),
        (["placement.update.pool=gpu"], [], False),
        ([], ["placement.rewards.pool=cpu"], False),
        (["placement.rollouts.pool=gpu"], ["placement.rollouts.pool=null"], True),
    ],
)
def test_an_evaluation_has_a_machine_to_itself_unless_a_stage_waits_for_a_pool(
    tmp_path: Path, settings: list[str], overrides: list[str], expected: bool
) -> None:
    config = read_config(TINY, ["run.name=tiny", *settings])
    content = yaml.safe_dump(config.model_dump(mode="json")).encode()
    described = {"name": "tiny", "schema_version": SCHEMA_VERSION}
    write_description(ArtifactStore(str(tmp_path), "tiny"), described, content)
    request = {"run": "tiny", "root": str(tmp_path), "overrides": overrides}
    assert uses_the_gpu({"request": request}) is expected
