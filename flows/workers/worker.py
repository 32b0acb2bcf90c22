"""`grpo worker POOL`: stages in one process that keeps its model; training, evaluation and rescoring in their own."""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.flow_engine import run_flow_async
from prefect.states import Cancelled
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.workers.stage_flows import PROCESS, STAGE_FLOWS
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT
from tasks.progress import log

KIND = "grpo"
"""Type of the work pools that these workers serve."""
STAGES_QUEUE = "stages"
"""Work queue of a pool for its stages; whatever else is deployed to the pool lies in the others."""
_PLACED = ("rollouts", "rewards", "advantages", "update")
_SECONDS_BETWEEN_LOOKS = 2.0
# Each look at the server is a write of its database; who starts a training does not miss these seconds.
_SECONDS_BETWEEN_RUNS = 5.0


class ResidentWorker(ProcessWorker):
    """Does one thing at a time: a stage in the process that keeps the model, any other flow in a process of its own.

    Two of them share a process and its machine, so that a run can be at work beside the stages that it waits for.

    Args:
        pool: that it serves.
        queues: of the pool, those that it takes from.
        name: on the server.
        looking: held by whichever of the two looks for work.
        pause: seconds from one look to the next, at least; the setting of Prefect holds for both.
    """

    type = KIND
    _display_name = "GRPO"
    _description = "Stages of training runs in a process that keeps its model between them."

    def __init__(self, pool: str, queues: list[str], name: str, looking: anyio.Lock, pause: float = 0.0) -> None:
        super().__init__(pool, work_queues=queues, name=name, limit=1)
        self.beside: ResidentWorker | None = None
        self._looking, self._pause, self._looked = looking, pause, float("-inf")
        self._taken: FlowRun | None = None
        self._names: dict[UUID, str] = {}

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Take up what is due, unless the other one is at something that has the machine to itself."""
        async with self._looking:
            early = time.monotonic() - self._looked < self._pause
            if early or (self.beside is not None and self.beside.needs_the_machine()):
                return []
            self._looked = time.monotonic()
            taken = await super().get_and_submit_flow_runs()
            self._taken = taken[-1] if taken else self._taken
            return taken

    def needs_the_machine(self) -> bool:
        """Whether it is at something that takes the machine's memory and processors."""
        at_work = self.is_setup and self.limiter.borrowed_tokens > 0
        return at_work and self._taken is not None and needs_the_machine(self._taken.parameters)

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """Do what a flow run asks."""
        if flow_run.flow_id not in self._names:
            self._names[flow_run.flow_id] = (await self.client.read_flow(flow_run.flow_id)).name
        flow = STAGE_FLOWS.get(self._names[flow_run.flow_id])
        if flow is None:
            # Paths of a configuration are relative to the checkout.
            configuration.working_dir = configuration.working_dir or CHECKOUT
            if needs_the_machine(flow_run.parameters):
                # Its model needs the memory in which the other one is kept.
                PROCESS.end()
            return await super().run(flow_run, configuration, task_status)
        if task_status is not None:
            task_status.started(os.getpid())
        log(f"{flow_run.name}: begun")
        cancelled = anyio.Event()
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._end_when_cancelled, flow_run, cancelled)
            state: Any = await run_flow_async(
                flow, flow_run=flow_run, parameters=flow_run.parameters, return_type="state"
            )
            beside.cancel_scope.cancel()
        if cancelled.is_set():
            # Only here: the server would take the failure of a stage that was ended for the last word.
            state = Cancelled()
            await self.client.set_flow_run_state(flow_run.id, state, force=True)
        log(f"{flow_run.name}: {state.name.lower()}")
        # A stage that failed has said so to its run; the worker itself is well.
        return ProcessWorkerResult(status_code=0, identifier=str(os.getpid()))

    async def _end_when_cancelled(self, flow_run: FlowRun, cancelled: anyio.Event) -> None:
        while True:
            await anyio.sleep(_SECONDS_BETWEEN_LOOKS)
            try:
                state = (await self.client.read_flow_run(flow_run.id)).state
            except ObjectNotFound:
                PROCESS.end()
                return
            except (httpx.HTTPError, PrefectHTTPStatusError):
                # A server that is away does not end a stage.
                continue
            if state is not None and state.is_cancelling():
                cancelled.set()
                PROCESS.end()
                return


def needs_the_machine(parameters: Mapping[str, Any]) -> bool:
    """Whether the parameters are those of a stage, or of a training that does every stage itself.

    A run with a stage on any pool waits for others most of its time. Were nothing else done meanwhile, runs could wait
    for each other, or for themselves, without end.
    """
    config = parameters.get("config")
    if not isinstance(config, Mapping):
        return "call" in parameters
    placement = config.get("placement") or {}
    sections = [*(placement.get(stage) for stage in _PLACED), *(config.get("rewards") or [])]
    return not any(section and section.get("pool") for section in sections)


async def serve(pool: str) -> None:
    """Serve a pool until interrupted; pool, queue and deployments of the stages are made if they are not there.

    Raises:
        InputError: there is a pool of this name for workers of another kind.
    """
    async with get_client() as client:
        await _require_pool(client, pool)
        await register_stages(client, pool)
        queues = [queue.name for queue in await client.read_work_queues(work_pool_name=pool)]
    name, looking = f"{pool}-{platform.node()}-{os.getpid()}", anyio.Lock()
    stages = ResidentWorker(pool, [STAGES_QUEUE], name, looking)
    others = [queue for queue in queues if queue != STAGES_QUEUE]
    runs = ResidentWorker(pool, others, f"{name}-runs", looking, _SECONDS_BETWEEN_RUNS)
    stages.beside, runs.beside = runs, stages
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        async with anyio.create_task_group() as both:
            both.start_soon(partial(stages.start, printer=log))
            both.start_soon(partial(runs.start, printer=log))
    finally:
        PROCESS.end()


async def _require_pool(client: PrefectClient, pool: str) -> None:
    try:
        found = await client.read_work_pool(pool)
    except ObjectNotFound:
        template = ResidentWorker.get_default_base_job_template()
        # Another worker of the pool may start at the same moment.
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=pool, type=KIND, base_job_template=template))
        found = await client.read_work_pool(pool)
    if found.type != KIND:
        hint = f"This pool is for workers of the type {found.type}; choose another name, or delete the pool."
        raise InputError("POOL", pool, hint)


async def register_stages(client: PrefectClient, pool: str) -> None:
    """Deploy the stages to the pool's queue for them, each under the pool's name."""
    # Of two workers that start at the same moment, one would fail at a deployment that makes the queue.
    with contextlib.suppress(ObjectAlreadyExists):
        await client.create_work_queue(STAGES_QUEUE, work_pool_name=pool)
    for stage in STAGE_FLOWS.values():
        deployment = await stage.ato_deployment(
            name=pool, work_pool_name=pool, work_queue_name=STAGES_QUEUE, tags=["grpo"]
        )
        await deployment.aapply()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
