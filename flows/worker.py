"""`grpo worker POOL`: run stages in one child that keeps its model, and other flows in separate processes."""

import asyncio
import contextlib
import os
import platform
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
import httpx
from prefect import Flow, flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State, WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.flow_engine import run_flow_async
from prefect.states import Cancelled, Failed
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.pipeline.prefect_ui import shown_in_ui
from flows.requests import EvaluateRequest
from flows.server.heartbeat_automation import ensure_automation
from flows.server.reachable import KIND
from grpo_core.errors import InputError, first_line
from tasks.execution.call import carry_out_in, read_call
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import LostStageError, StageCancelledError, StageTimeoutError, record_of
from tasks.execution.resources import resource, run_resources
from tasks.execution.stage import STAGES
from tasks.process import CHECKOUT
from tasks.progress import log
from tasks.runs.lookup import find_run
from tasks.runs.stored import stored_config
from tasks.storage.artifacts.store import ArtifactStore


async def carry_out_call(root: str, run: str, call: str, timeout: float | None = None) -> State | None:
    """Run the stage of a call, by its digest, in a run's folder; return a failed state, or None once it is recorded.

    Raises:
        ValueError: the call is missing or damaged.
        StageCancelledError: the stage was cancelled.
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
        # No run waits for it.
        store.clear_abandoned()
        raise
    except (LostStageError, StageTimeoutError) as error:
        store.clear_abandoned()
        return Failed(message=record_of(error).state_message())
    for reason in outcome.reasons:
        log(f"quarantined: {reason}")
    return None if outcome.error is None else Failed(message=outcome.error.state_message())


STAGE_FLOWS: Mapping[str, Flow[..., Coroutine[Any, Any, State | None]]] = {
    name: flow(name=name, description=f"The stage `{name}` of a run, for the workers of a pool.")(carry_out_call)
    for name in STAGES
}


STAGES_QUEUE = "stages"
"""Work queue of a pool for its stages; other deployments to the pool use its other queues."""
_STAGE_SECTIONS = ("rollouts", "rewards", "advantages", "update")
_SECONDS_BETWEEN_POLLS = 2.0
# Each poll writes to the server's database, and a training run can wait these seconds.
_SECONDS_BETWEEN_RUNS = 5.0


@dataclass
class WorkerState:
    """What the two workers of a process share: who polls, and when the process ends.

    Attributes:
        polling: held by the one of them that polls.
        idle: seconds without a flow run after which the process ends; None for no end.
        limit: flow runs after which it ends; None for no end.
        busy_until: when one of them was last running.
    """

    polling: anyio.Lock
    idle: float | None = None
    limit: int | None = None
    taken: int = 0
    busy_until: float = field(default_factory=time.monotonic)

    def is_full(self) -> bool:
        """Return whether no further flow run is taken."""
        return self.limit is not None and self.taken >= self.limit

    def end(self, *, busy: bool) -> str | None:
        """Return why the process ends now; None while it goes on."""
        now = time.monotonic()
        self.busy_until = now if busy else self.busy_until
        if not busy and self.is_full():
            return f"{self.taken} flow runs are done (--limit)"
        if self.idle is not None and now - self.busy_until >= self.idle:
            return f"nothing to do for {self.idle:g} s (--idle)"
        return None


class ResidentWorker(ProcessWorker):
    """Runs one flow at a time: a stage in the child that keeps the model, any other flow in a separate process.

    Two of them share a process and its machine, so that a run can continue while its stages run.
    """

    type = KIND
    _display_name = "GRPO"
    _description = "Stages of training runs in a process that keeps its model between them."

    def __init__(self, pool: str, queues: list[str], name: str, shift: WorkerState, pause: float = 0.0) -> None:
        super().__init__(pool, work_queues=queues, name=name, limit=1)
        self.other: ResidentWorker | None = None
        self._shift, self._pause, self._polled = shift, pause, float("-inf")
        self._children = resource(ChildProcesses)
        self._takes_the_gpu = False
        self._names: dict[UUID, str] = {}

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Take a flow run that is due, unless the other worker runs one that needs the machine."""
        async with self._shift.polling:
            early = time.monotonic() - self._polled < self._pause
            if early or self._shift.is_full() or (self.other is not None and self.other.uses_the_gpu()):
                return []
            self._polled = time.monotonic()
            taken = await super().get_and_submit_flow_runs()
            if taken:
                self._takes_the_gpu = await asyncio.to_thread(uses_the_gpu, taken[-1].parameters)
            self._shift.taken += len(taken)
            return taken

    def is_busy(self) -> bool:
        """Return whether it runs anything."""
        return self.is_setup and self.limiter.borrowed_tokens > 0

    def uses_the_gpu(self) -> bool:
        """Return whether it runs something that takes the machine's memory and processors."""
        return self.is_busy() and self._takes_the_gpu

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """Run a flow run."""
        if flow_run.flow_id not in self._names:
            self._names[flow_run.flow_id] = (await self.client.read_flow(flow_run.flow_id)).name
        flow = STAGE_FLOWS.get(self._names[flow_run.flow_id])
        if flow is None:
            log(f"{flow_run.name}: begun")
            # Paths of a configuration are relative to the checkout.
            configuration.working_dir = configuration.working_dir or CHECKOUT
            if await asyncio.to_thread(uses_the_gpu, flow_run.parameters):
                # Its model needs the memory of the one that the child keeps.
                self._children.close()
            return await super().run(flow_run, configuration, task_status)
        if task_status is not None:
            task_status.started(os.getpid())
        log(f"{flow_run.name}: begun")
        cancelled = anyio.Event()
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._end_when_cancelled, flow_run, cancelled)
            state: Any = await run_flow_async(
                flow, flow_run=flow_run, parameters=flow_run.parameters, return_type="state"
            )
            watching.cancel_scope.cancel()
        if cancelled.is_set() or state.is_cancelling():
            # At the end, since the stage that was killed has set its own run to failed; one that was cancelled before
            # it ran is cancelling still.
            state = Cancelled()
            await self.client.set_flow_run_state(flow_run.id, state, force=True)
        log(f"{flow_run.name}: {state.name.lower()}")
        # A failed stage has reported its error to its run; the worker itself did not fail.
        return ProcessWorkerResult(status_code=0, identifier=str(os.getpid()))

    async def _end_when_cancelled(self, flow_run: FlowRun, cancelled: anyio.Event) -> None:
        while True:
            await anyio.sleep(_SECONDS_BETWEEN_POLLS)
            try:
                state = (await self.client.read_flow_run(flow_run.id)).state
            except ObjectNotFound:
                self._children.close()
                return
            except (httpx.HTTPError, PrefectHTTPStatusError):
                # A stage continues while the server is unreachable.
                continue
            if state is not None and state.is_cancelling():
                cancelled.set()
                self._children.close()
                return


def uses_the_gpu(parameters: Mapping[str, Any]) -> bool:
    """Return whether a flow with these parameters runs stages itself; a run with a stage on a pool mostly waits."""
    config = parameters.get("config", _evaluated(parameters.get("request")))
    if not isinstance(config, Mapping):
        return "call" in parameters
    placement = config.get("placement") or {}
    sections = [*(placement.get(stage) for stage in _STAGE_SECTIONS), *(config.get("rewards") or [])]
    return not any(section and section.get("pool") for section in sections)


def _evaluated(request: object) -> Mapping[str, Any] | None:
    """Return the configuration by which a run is evaluated; None for another request, or one that will be refused."""
    if not isinstance(request, Mapping) or not isinstance(request.get("run"), str):
        return None
    root = str(request.get("root", EvaluateRequest.model_fields["root"].default))
    try:
        # As the flow finds it, which runs in the checkout.
        store = find_run(request["run"], root if "://" in root else str(CHECKOUT / root))
        return stored_config(store, request.get("overrides") or ()).model_dump(mode="json")
    except (InputError, OSError) as error:
        log(f"{request['run']}: it cannot be evaluated ({first_line(error)})")
        return None


async def serve(pool: str, idle: float | None = None, limit: int | None = None) -> None:
    """Serve a pool; what it lacks is created: pool, queue, deployments of the stages and the heartbeat automation.

    It ends after `idle` seconds without a flow run, or `limit` flow runs; None is without end.

    Raises:
        InputError: the pool of this name is for workers of another type.
    """
    async with get_client() as client:
        await _require_pool(client, pool)
        await register_stages(client, pool)
        await ensure_automation(client)
        queues = [queue.name for queue in await client.read_work_queues(work_pool_name=pool)]
    name, shift = f"{pool}-{platform.node()}-{os.getpid()}", WorkerState(anyio.Lock(), idle, limit)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with run_resources():
        stages = ResidentWorker(pool, [STAGES_QUEUE], name, shift)
        others = [queue for queue in queues if queue != STAGES_QUEUE]
        runs = ResidentWorker(pool, others, f"{name}-runs", shift, _SECONDS_BETWEEN_RUNS)
        stages.other, runs.other = runs, stages
        async with anyio.create_task_group() as both:
            both.start_soon(partial(stages.start, printer=log))
            both.start_soon(partial(runs.start, printer=log))
            while True:
                await anyio.sleep(_SECONDS_BETWEEN_POLLS)
                # Nothing is taken meanwhile.
                async with shift.polling:
                    reason = shift.end(busy=stages.is_busy() or runs.is_busy())
                if reason is not None:
                    log(f"worker ends: {reason}")
                    both.cancel_scope.cancel()
                    return


async def read_or_create_pool(client: PrefectClient, name: str) -> WorkPool:
    """Return the pool of this name, whatever its type; one that does not exist is created for `grpo worker`."""
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        # Workers of this type have the settings of Prefect's process workers.
        template = ProcessWorker.get_default_base_job_template()
        # A worker of the pool may start at the same moment.
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=name, type=KIND, base_job_template=template))
        return await client.read_work_pool(name)


async def _require_pool(client: PrefectClient, pool: str) -> None:
    found = await read_or_create_pool(client, pool)
    if found.type != KIND:
        hint = f"This pool is for workers of type {found.type}; choose another name, or delete the pool."
        raise InputError("POOL", pool, hint)


async def register_stages(client: PrefectClient, pool: str) -> None:
    """Deploy every stage to the pool's stages queue, under the pool's name."""
    # If two workers start at the same moment, one of them fails to create the queue.
    with contextlib.suppress(ObjectAlreadyExists):
        await client.create_work_queue(STAGES_QUEUE, work_pool_name=pool)
    for stage in STAGE_FLOWS.values():
        deployment = await stage.ato_deployment(
            name=pool, work_pool_name=pool, work_queue_name=STAGES_QUEUE, tags=["grpo"]
        )
        await deployment.aapply()
