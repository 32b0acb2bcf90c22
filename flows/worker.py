"""`grpo worker POOL`: stages in one process that keeps its model; training, evaluation and rescoring in their own."""

import contextlib
import os
import platform
import signal
from types import FrameType
from typing import Any

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

from flows.stage_flows import PROCESS, STAGE_FLOWS
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT
from tasks.progress import announce

KIND = "grpo"
"""Type of the work pools that these workers serve."""
_SECONDS_BETWEEN_LOOKS = 2.0


class ResidentWorker(ProcessWorker):
    """Does one thing at a time: a stage in the process that keeps the model, any other flow in a process of its own."""

    type = KIND
    _display_name = "GRPO"
    _description = "Stages of training runs in a process that keeps its model between them."

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """Do what a flow run asks."""
        flow = await self.client.read_flow(flow_run.flow_id)
        if flow.name not in STAGE_FLOWS:
            # Paths of a configuration are relative to the checkout.
            configuration.working_dir = configuration.working_dir or CHECKOUT
            return await super().run(flow_run, configuration, task_status)
        if task_status is not None:
            task_status.started(os.getpid())
        announce(f"{flow_run.name}: begun")
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._end_when_cancelled, flow_run)
            state: Any = await run_flow_async(
                STAGE_FLOWS[flow.name], flow_run=flow_run, parameters=flow_run.parameters, return_type="state"
            )
            beside.cancel_scope.cancel()
        announce(f"{flow_run.name}: {state.name.lower()}")
        # A stage that failed has said so to its run; the worker itself is well.
        return ProcessWorkerResult(status_code=0, identifier=str(os.getpid()))

    async def _end_when_cancelled(self, flow_run: FlowRun) -> None:
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
                PROCESS.end()
                await self.client.set_flow_run_state(flow_run.id, Cancelled(), force=True)
                return


async def serve(pool: str) -> None:
    """Serve a pool until interrupted; the pool and the deployments of the stages are made if they are not there.

    Raises:
        InputError: there is a pool of this name for workers of another kind.
    """
    async with get_client() as client:
        await _require_pool(client, pool)
        await register_stages(pool)
    worker = ResidentWorker(work_pool_name=pool, name=f"{pool}-{platform.node()}-{os.getpid()}", limit=1)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        await worker.start(printer=announce)
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
        mend = f"This pool is for workers of the type {found.type}; choose another name, or delete the pool."
        raise InputError("POOL", pool, mend)


async def register_stages(pool: str) -> None:
    """Deploy the stages to the pool, each under the pool's name."""
    for stage in STAGE_FLOWS.values():
        deployment = await stage.ato_deployment(name=pool, work_pool_name=pool, tags=["grpo"])
        await deployment.aapply()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
