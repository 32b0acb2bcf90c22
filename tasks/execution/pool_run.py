"""The flow run of a stage on a work pool, watched until it ends or its worker has died."""

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, Worker, WorkerStatus
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling, Crashed

from tasks.execution.cancellation import StopSignals
from tasks.execution.child_process import SECONDS_TO_START
from tasks.execution.errors import (
    LostStageError,
    Retryable,
    StageCancelledError,
    StageTimeoutError,
    retryable_kind,
)
from tasks.execution.resources import resource
from tasks.progress import log

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


def is_final(flow_run: FlowRun) -> bool:
    """Return whether the flow run has ended, in whatever state."""
    return flow_run.state is not None and flow_run.state.is_final()


class _Watch:
    """The state of one flow run, and the times of its changes."""

    def __init__(self, client: SyncPrefectClient, flow_run: FlowRun, pool: str, timeout: float | None) -> None:
        self.client, self.pool, self.timeout = client, pool, timeout
        self.id: UUID = flow_run.id
        self.begun = self.last_answer = self.checked = time.monotonic()
        self.taken: float | None = None
        self.running: float | None = None
        self.ended = False
        self.logged: set[str] = set()
        self.last_heartbeat: datetime | None = None
        self.heartbeat_seen = self.begun

    def has_ended(self) -> bool:
        """Read the run's state once.

        Raises:
            LostStageError: its worker has died.
            StageCancelledError: it was cancelled.
            StageTimeoutError: its worker does not end it.
        """
        flow_run = self.client.read_flow_run(self.id)
        self.last_answer = now = time.monotonic()
        state = flow_run.state
        if state is not None and state.is_final():
            self.ended = True
            if state.is_cancelled():
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled")
            return True
        if state is not None and not state.is_scheduled():
            self.taken = self.taken or now
        if state is not None and state.is_running():
            self.running = self.running or now
        if now - self.checked >= SECONDS_BETWEEN_CHECKS:
            self.checked = now
            self._require_worker(flow_run)
        return False

    def _require_worker(self, flow_run: FlowRun) -> None:
        now = time.monotonic()
        workers = {worker.name: worker for worker in self.client.read_workers_for_work_pool(self.pool)}
        if self.taken is None:
            reason = self._hindrance(flow_run, workers.values())
            if reason is not None and reason not in self.logged:
                self.logged.add(reason)
                log(f"waiting for a worker of pool {self.pool}: {reason}")
            return
        name = str(flow_run.labels.get(WORKER_LABEL, ""))
        if name and self._lacks_heartbeats(workers.get(name)):
            reason = f"worker {name} of pool {self.pool} has died"
            if flow_run.state is not None and flow_run.state.is_cancelling():
                # Only a worker ends a cancelled run, and another worker must not run it.
                self.client.set_flow_run_state(self.id, Cancelled(message=reason), force=True)
                self.ended = True
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled; {reason}")
            self._give_up(reason)
        if self.running is None and now - self.taken > SECONDS_PENDING:
            self._give_up(f"a worker of pool {self.pool} took it and did not begin it in {SECONDS_PENDING:g} s")
        if self.timeout and self.running and now - self.running > self.timeout + SECONDS_OF_GRACE:
            self.client.set_flow_run_state(self.id, Cancelling(), force=True)
            raise StageTimeoutError(f"not done after {self.timeout:g} s, and its worker did not kill it")

    def _hindrance(self, flow_run: FlowRun, workers: Iterable[Worker]) -> str | None:
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
        """Return whether heartbeats have stopped, by the clock of this machine.

        The server's own check is a service that may be late, or not be running.
        """
        if worker is None:
            return True
        if worker.last_heartbeat_time != self.last_heartbeat:
            self.last_heartbeat, self.heartbeat_seen = worker.last_heartbeat_time, time.monotonic()
        interval = worker.heartbeat_interval_seconds or SECONDS_BETWEEN_HEARTBEATS
        return time.monotonic() - self.heartbeat_seen > max(MIN_SECONDS_WITHOUT_HEARTBEAT, MISSED_HEARTBEATS * interval)

    def _give_up(self, reason: str) -> None:
        self.client.set_flow_run_state(self.id, Crashed(message=reason), force=True)
        raise LostStageError(reason)


def follow(flow_run: FlowRun, pool: str, timeout: float | None, *, has_outcome: Callable[[], bool]) -> None:
    """Wait until the server reports the end of the flow run, or the run's folder has its outcome.

    While the server does not answer, the run waits. When the run that requested the stage stops, it cancels the stage.

    Args:
        flow_run: flow run of the stage.
        pool: name of the pool that it was sent to.
        timeout: seconds that it may run; None for no limit.
        has_outcome: returns whether its outcome is in the run's folder.

    Raises:
        LostStageError: its worker has died, or the server does not come back.
        StageTimeoutError: its worker does not end it.
        StageCancelledError: it was cancelled, or the run that requested it was stopped.
    """
    stop = resource(StopSignals)
    with get_client(sync_client=True) as client:
        watch = _Watch(client, flow_run, pool, timeout)
        try:
            while not _has_ended(watch, has_outcome):
                pause = POLL_SHARE * (time.monotonic() - watch.begun)
                if stop.cancelled.wait(min(MAX_SECONDS_BETWEEN_POLLS, max(SECONDS_BETWEEN_POLLS, pause))):
                    raise StageCancelledError("the run that requested it was stopped")
                if stop.failed.is_set() and watch.taken is None:
                    raise StageCancelledError("the run that requested it failed before a worker took it")
        except (LostStageError, StageTimeoutError):
            raise
        except BaseException:
            if not watch.ended:
                # Not forced: the server itself ends a run that no worker has taken yet.
                client.set_flow_run_state(watch.id, Cancelling())
            raise


def _has_ended(watch: _Watch, has_outcome: Callable[[], bool]) -> bool:
    try:
        return watch.has_ended()
    except ObjectNotFound as error:
        raise LostStageError("its flow run was deleted") from error
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        if retryable_kind(error) is not Retryable.SERVICE:
            raise
        if has_outcome():
            return True
        waited = time.monotonic() - watch.last_answer
        if waited > SECONDS_WITHOUT_SERVER:
            raise LostStageError(f"the Prefect server has not answered for {waited:.0f} s ({error})") from error
        return False
