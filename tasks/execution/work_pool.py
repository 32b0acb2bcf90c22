"""Send a stage to a work pool: a call in the run's folder, and a flow run that points at it.

Only the name of the call goes through the server, which refuses parameters over 512 KiB. The worker records the stage
in the run's folder, and then removes the call; the state of the flow run has the error of a stage that failed. The flow
run is watched until it ends or its worker has died.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, TaskRun, TaskRunResult, Worker, WorkerStatus
from prefect.context import TaskRunContext
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling, Crashed, Scheduled

from grpo_core.errors import InputError
from tasks.execution.call import StageCall, call_file, naming_timeout, remove_call, write_call
from tasks.execution.child_process import SECONDS_TO_START
from tasks.execution.errors import (
    ErrorRecord,
    LostStageError,
    Retryable,
    StageCancelledError,
    StageTimeoutError,
    retryable_kind,
)
from tasks.execution.resources import resource
from tasks.execution.stage import Reference
from tasks.execution.stopping import StopSignals
from tasks.progress import log
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.prefect_results import recorded_stage

SECONDS_BETWEEN_POLLS = 0.1
MAX_SECONDS_BETWEEN_POLLS = 1.0
# The pause grows with the time that has been waited.
POLL_SHARE = 0.05
SECONDS_BETWEEN_CHECKS = 3.0
SECONDS_BETWEEN_HEARTBEATS = 30.0
# A busy machine may send a heartbeat late, and a stage that is sent again runs twice.
MISSED_HEARTBEATS = 4
MIN_SECONDS_WITHOUT_HEARTBEAT = 15.0
SECONDS_WITHOUT_SERVER = 600.0
SECONDS_PENDING = 60.0
# The worker kills a stage at its timeout, counted from when its child is ready; after this the worker has not obeyed.
SECONDS_OF_GRACE = SECONDS_TO_START + 60.0
WORKER_LABEL = "prefect.worker.name"


def carry_out_on_pool(call: StageCall, pool: str, timeout: float | None, store: ArtifactStore) -> Reference:
    """Have a worker of the pool run the stage, and wait for it; raises whatever the stage raised.

    A run that was killed while it waited finds the record at its next start, or waits again. The timeout counts once a
    worker has begun the stage. InputError if none has ever served it, LostStageError if its worker has died.
    """
    name = call.digest
    assert call.key is not None, "a worker records what it has made"

    def is_answered() -> bool:
        return store.read_file(call_file(name)) is None

    write_call(store, call)
    with get_client(sync_client=True) as client:
        flow_run = _flow_run(client, call, pool, timeout)
    with naming_timeout(call.stage, call.arguments):
        state = follow(flow_run, pool, timeout, is_answered)
    # Another worker, which had seemed dead, may have answered instead of the one that was followed.
    if state is not None and not state.is_completed() and not is_answered():
        error = ErrorRecord.from_state_message(state.message)
        if error is not None:
            remove_call(store, name)
            raise error.error()
    elif (reference := recorded_stage(store, call.key)) is not None:
        # Written again if another start of the run had it answered meanwhile.
        remove_call(store, name)
        return reference
    lost = f"{call.stage}: a worker of pool {pool} recorded neither a result nor an error"
    raise LostStageError(f"{lost}; its log says why, and whether it can reach {call.storage.root} at all")


def _flow_run(client: SyncPrefectClient, call: StageCall, pool: str, timeout: float | None) -> FlowRun:
    """Create a flow run of the call, or return the unfinished one that an earlier start of this run created."""
    context = TaskRunContext.get()
    stage = context.task_run.name if context else call.stage
    parameters: dict[str, Any] = {"root": call.storage.root, "run": call.run, "call": call.digest, "timeout": timeout}
    try:
        deployment = client.read_deployment_by_name(f"{call.stage}/{pool}")
    except ObjectNotFound as error:
        hint = f"No worker has served it. Start one with `grpo worker {pool}`; it makes the pool and its deployments."
        raise InputError("placement pool", pool, hint) from error
    title = f"{stage} on {pool}"
    link = _link(client, context, title, call) if context else None
    for attempt in itertools.count(1):
        flow_run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters=parameters,
            state=Scheduled(),
            name=title,
            tags=[call.run, pool],
            idempotency_key=f"{call.digest}-{attempt}",
            parent_task_run_id=link.id if link else None,
        )
        state = flow_run.state
        if state is None or not (state.is_final() or state.is_cancelling()):
            if link is not None and flow_run.parent_task_run_id != link.id:
                client.delete_task_run(link.id)
            log(f"{stage}: sent to pool {pool}")
            return flow_run
    raise AssertionError("attempts have no end")


def _link(client: SyncPrefectClient, stage: TaskRunContext, title: str, call: StageCall) -> TaskRun:
    """Create a task run that shows the flow run on its run's page: its parent must be one that the server knows."""
    return client.create_task_run(
        stage.task,
        flow_run_id=stage.task_run.flow_run_id,
        dynamic_key=f"{call.digest}-{stage.task_run.run_count}",
        name=title,
        task_inputs={"__parents__": [TaskRunResult(id=stage.task_run.id)]},
    )


class _Watch:
    """The state of one flow run, and the times of its changes."""

    def __init__(self, client: SyncPrefectClient, flow_run: FlowRun, pool: str, timeout: float | None) -> None:
        self.client, self.pool, self.timeout = client, pool, timeout
        self.id: UUID = flow_run.id
        self.begun = self.last_answer = self.checked = time.monotonic()
        self.taken: float | None = None
        self.running: float | None = None
        self.end: State | None = None
        self.logged: set[str] = set()
        self.last_heartbeat: datetime | None = None
        self.heartbeat_seen = self.begun

    def look(self) -> None:
        """Read the run's state once; raises the errors of `follow`."""
        flow_run = self.client.read_flow_run(self.id)
        self.last_answer = now = time.monotonic()
        state = flow_run.state
        if state is not None and state.is_final():
            self.end = state
            if state.is_cancelled():
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled")
            return
        if state is not None and not state.is_scheduled():
            self.taken = self.taken or now
        if state is not None and state.is_running():
            self.running = self.running or now
        if now - self.checked >= SECONDS_BETWEEN_CHECKS:
            self.checked = now
            self._require_worker(flow_run)

    def _require_worker(self, flow_run: FlowRun) -> None:
        now = time.monotonic()
        workers = {worker.name: worker for worker in self.client.read_workers_for_work_pool(self.pool)}
        if self.taken is None:
            reason = self._why_waiting(flow_run, workers.values())
            if reason is not None and reason not in self.logged:
                self.logged.add(reason)
                log(f"waiting for a worker of pool {self.pool}: {reason}")
            return
        name = str(flow_run.labels.get(WORKER_LABEL, ""))
        if name and self._lacks_heartbeats(workers.get(name)):
            reason = f"worker {name} of pool {self.pool} has died"
            if flow_run.state is not None and flow_run.state.is_cancelling():
                # Only a worker ends a cancelled run, and another worker must not run it.
                self.end = Cancelled(message=reason)
                self.client.set_flow_run_state(self.id, self.end, force=True)
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled; {reason}")
            self._give_up(reason)
        if self.running is None and now - self.taken > SECONDS_PENDING:
            self._give_up(f"a worker of pool {self.pool} took it and did not begin it in {SECONDS_PENDING:g} s")
        if self.timeout and self.running and now - self.running > self.timeout + SECONDS_OF_GRACE:
            self.client.set_flow_run_state(self.id, Cancelling(), force=True)
            raise StageTimeoutError(f"not done after {self.timeout:g} s, and its worker did not kill it")

    def _why_waiting(self, flow_run: FlowRun, workers: Iterable[Worker]) -> str | None:
        """Say why no worker takes it, if only a person can change that."""
        if self.client.read_work_pool(self.pool).is_paused:
            return f"the pool is paused; `prefect work-pool resume {self.pool}`"
        queue = flow_run.work_queue_id and self.client.read_work_queue(flow_run.work_queue_id)
        if queue and queue.is_paused:
            return f"its queue is paused; `prefect work-queue resume {queue.name} --pool {self.pool}`"
        if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
            return f"none is online; start `grpo worker {self.pool}`"
        return None

    def _lacks_heartbeats(self, worker: Worker | None) -> bool:
        """Return whether heartbeats have stopped, by this machine's clock: the server's own check may be late."""
        if worker is None:
            return True
        if worker.last_heartbeat_time != self.last_heartbeat:
            self.last_heartbeat, self.heartbeat_seen = worker.last_heartbeat_time, time.monotonic()
        interval = worker.heartbeat_interval_seconds or SECONDS_BETWEEN_HEARTBEATS
        return time.monotonic() - self.heartbeat_seen > max(MIN_SECONDS_WITHOUT_HEARTBEAT, MISSED_HEARTBEATS * interval)

    def _give_up(self, reason: str) -> None:
        self.client.set_flow_run_state(self.id, Crashed(message=reason), force=True)
        raise LostStageError(reason)


def follow(flow_run: FlowRun, pool: str, timeout: float | None, is_answered: Callable[[], bool]) -> State | None:
    """Wait until the flow run has ended; return its last state, or None if the stage is recorded without the server.

    While the server does not answer, the run waits, and asks `is_answered` whether the stage is recorded. When the run
    stops at once, it cancels the stage; when it was asked to stop, it waits for one that a worker has taken, and
    withdraws any other: StageCancelledError. LostStageError if the worker has died, or the server does not come back;
    StageTimeoutError if its worker does not end it within `timeout` seconds.
    """
    stop = resource(StopSignals)
    with get_client(sync_client=True) as client:
        watch = _Watch(client, flow_run, pool, timeout)
        try:
            while not _is_over(watch, is_answered):
                pause = POLL_SHARE * (time.monotonic() - watch.begun)
                if stop.cancelled.wait(min(MAX_SECONDS_BETWEEN_POLLS, max(SECONDS_BETWEEN_POLLS, pause))):
                    raise StageCancelledError("the run that requested it was stopped")
                if (stop.failed.is_set() or stop.requested is not None) and watch.taken is None:
                    raise StageCancelledError("the run that requested it ended before a worker took it")
        except (LostStageError, StageTimeoutError):
            raise
        except BaseException:
            if watch.end is None:
                # Not forced: the server itself ends a run that no worker has taken yet.
                client.set_flow_run_state(watch.id, Cancelling())
            raise
    return watch.end


def _is_over(watch: _Watch, is_answered: Callable[[], bool]) -> bool:
    try:
        watch.look()
    except ObjectNotFound as error:
        raise LostStageError("its flow run was deleted") from error
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        if retryable_kind(error) is not Retryable.SERVICE:
            raise
        if is_answered():
            return True
        waited = time.monotonic() - watch.last_answer
        if waited > SECONDS_WITHOUT_SERVER:
            raise LostStageError(f"the Prefect server has not answered for {waited:.0f} s ({error})") from error
    return watch.end is not None
