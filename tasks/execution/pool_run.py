"""The flow run of a stage on a work pool, followed from here until it is over or its worker is gone."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import FrameType
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, Worker, WorkerStatus
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling, Crashed

from tasks.execution.child_process import SECONDS_TO_START
from tasks.execution.faults import Fault, LostStageError, StageCancelledError, StageTimeoutError, fault_of
from tasks.progress import log

SECONDS_BETWEEN_LOOKS = 0.1
LONGEST_BETWEEN_LOOKS = 1.0
# Of the time that was waited already.
SHARE_BETWEEN_LOOKS = 0.05
SECONDS_BETWEEN_CHECKS = 3.0
SECONDS_BETWEEN_HEARTBEATS = 30.0
# A machine that is busy may be late with a heartbeat, and a stage that is sent again is done twice.
MISSED_HEARTBEATS = 4
LEAST_SECONDS_OF_SILENCE = 15.0
SECONDS_WITHOUT_SERVER = 600.0
SECONDS_PENDING = 60.0
# The worker ends a stage by itself, and counts from when its child is ready; beyond this its machine has not obeyed.
SECONDS_OF_GRACE = SECONDS_TO_START + 60.0
WORKER = "prefect.worker.name"


_GIVEN_UP, _FAILED = threading.Event(), threading.Event()


@contextlib.contextmanager
def stages_withdrawn_on_failure() -> Iterator[None]:
    """Have every stage that no worker has taken yet withdrawn when the run fails, so that the failure can be told.

    What a worker is at is waited for: it is kept for the next start.
    """
    try:
        yield
    except Exception:
        _FAILED.set()
        raise


@contextlib.contextmanager
def stages_cancelled_on_interrupt() -> Iterator[None]:
    """Have every stage that is waited for cancelled when the run is stopped.

    Those of shards, of rewards and of rollouts ahead are waited for in threads, which no signal reaches, and which are
    joined before the run can end.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            _GIVEN_UP.set()
        raise


@contextlib.contextmanager
def stages_cancelled_on_signal() -> Iterator[None]:
    """Have every stage that is waited for cancelled at the first interrupt of this run.

    asyncio raises nothing at the first one: it cancels a coroutine that is waiting for the stage.
    """
    _GIVEN_UP.clear()
    _FAILED.clear()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        _GIVEN_UP.set()
        previous(number, frame)

    signal.signal(signal.SIGINT, give_up)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def is_final(flow_run: FlowRun) -> bool:
    """Whether it has ended, one way or another."""
    return flow_run.state is not None and flow_run.state.is_final()


class _Watch:
    """What is known of one flow run, and since when."""

    def __init__(self, client: SyncPrefectClient, flow_run: FlowRun, pool: str, timeout: float | None) -> None:
        self.client, self.pool, self.timeout = client, pool, timeout
        self.id: UUID = flow_run.id
        self.begun = self.heard = self.checked = time.monotonic()
        self.taken: float | None = None
        self.running: float | None = None
        self.over = False
        self.told: set[str] = set()
        self.last_beat: datetime | None = None
        self.beaten = self.begun

    def is_over(self) -> bool:
        """Look at the run once.

        Raises:
            LostStageError: its worker is gone.
            StageTimeoutError: its worker does not end it.
        """
        flow_run = self.client.read_flow_run(self.id)
        self.heard = now = time.monotonic()
        if is_final(flow_run):
            self.over = True
            if flow_run.state is not None and flow_run.state.is_cancelled():
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled")
            return True
        state = flow_run.state
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
            if reason is not None and reason not in self.told:
                self.told.add(reason)
                log(f"waiting for a worker of pool {self.pool}: {reason}")
            return
        name = str(flow_run.labels.get(WORKER, ""))
        if name and self._is_silent(workers.get(name)):
            reason = f"worker {name} of pool {self.pool} is gone"
            if flow_run.state is not None and flow_run.state.is_cancelling():
                # Nobody else would say so, and whoever cancelled it does not want it done by another worker.
                self.client.set_flow_run_state(self.id, Cancelled(message=reason), force=True)
                self.over = True
                raise StageCancelledError(f"flow run {flow_run.name} was cancelled; {reason}")
            self._give_up(reason)
        if self.running is None and now - self.taken > SECONDS_PENDING:
            self._give_up(f"a worker of pool {self.pool} took it and did not begin it in {SECONDS_PENDING:g} s")
        if self.timeout and self.running and now - self.running > self.timeout + SECONDS_OF_GRACE:
            self.client.set_flow_run_state(self.id, Cancelling(), force=True)
            raise StageTimeoutError(f"not done after {self.timeout:g} s, and its worker did not end it")

    def _hindrance(self, flow_run: FlowRun, workers: Iterable[Worker]) -> str | None:
        """Why no worker takes it, if that takes a person to hint."""
        if self.client.read_work_pool(self.pool).is_paused:
            return f"the pool is paused; `prefect work-pool resume {self.pool}`"
        queue = flow_run.work_queue_id and self.client.read_work_queue(flow_run.work_queue_id)
        if queue and queue.is_paused:
            return f"its queue is paused; `prefect work-queue resume {queue.name} --pool {self.pool}`"
        if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
            return f"none is there; start `grpo worker {self.pool}`"
        return None

    def _is_silent(self, worker: Worker | None) -> bool:
        """Whether nothing has been heard of it for long, by the clock of this machine alone.

        The server's own word comes from a service that may be late, or not be running.
        """
        if worker is None:
            return True
        if worker.last_heartbeat_time != self.last_beat:
            self.last_beat, self.beaten = worker.last_heartbeat_time, time.monotonic()
        interval = worker.heartbeat_interval_seconds or SECONDS_BETWEEN_HEARTBEATS
        return time.monotonic() - self.beaten > max(LEAST_SECONDS_OF_SILENCE, MISSED_HEARTBEATS * interval)

    def _give_up(self, reason: str) -> None:
        self.client.set_flow_run_state(self.id, Crashed(message=reason), force=True)
        raise LostStageError(reason)


def follow(flow_run: FlowRun, pool: str, timeout: float | None, *, over: Callable[[], bool]) -> None:
    """Return once the run is over, by the server's word or by that of the run's folder.

    A server that does not answer is waited for; whoever stops waiting has the stage cancelled.

    Args:
        flow_run: of the stage.
        pool: that it was sent to.
        timeout: seconds that it may take once it is running.
        over: whether its outcome lies in the run's folder.

    Raises:
        LostStageError: its worker is gone, or the server is.
        StageTimeoutError: its worker does not end it.
        StageGivenUpError: it was cancelled, or the run that asked for it was stopped.
    """
    with get_client(sync_client=True) as client:
        watch = _Watch(client, flow_run, pool, timeout)
        try:
            while not _is_over(watch, over):
                pause = SHARE_BETWEEN_LOOKS * (time.monotonic() - watch.begun)
                if _GIVEN_UP.wait(min(LONGEST_BETWEEN_LOOKS, max(SECONDS_BETWEEN_LOOKS, pause))):
                    raise StageCancelledError("the run that asked for it was stopped")
                if _FAILED.is_set() and watch.taken is None:
                    raise StageCancelledError("the run that asked for it failed before a worker took it")
        except (LostStageError, StageTimeoutError):
            raise
        except BaseException:
            if not watch.over:
                # Not forced: the server itself ends what no worker has taken yet.
                client.set_flow_run_state(watch.id, Cancelling())
            raise


def _is_over(watch: _Watch, over: Callable[[], bool]) -> bool:
    try:
        return watch.is_over()
    except ObjectNotFound as error:
        raise LostStageError("its flow run was deleted") from error
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        if fault_of(error) is not Fault.SERVICE:
            raise
        if over():
            return True
        silent = time.monotonic() - watch.heard
        if silent > SECONDS_WITHOUT_SERVER:
            raise LostStageError(f"the Prefect server has not answered for {silent:.0f} s ({error})") from error
        return False
