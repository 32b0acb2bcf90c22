"""Child processes that do stages, keep their model from one to the next, and can be ended at any moment."""

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

import psutil

from tasks.checkout import environment
from tasks.execution.call import StageCall, StageOutcome
from tasks.execution.faults import LostStageError, StageCancelledError, StageTimeoutError
from tasks.progress import ProgressReporter

ADVANCE, ANNOUNCE, OUTCOME, READY = "advance", "log", "outcome", "ready"
CHILD = ("-m", "tasks.execution.child_main")
SECONDS_TO_START = 600.0
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 5.0
STDERR_TAIL_LINES = 30
STDERR_TAIL_BYTES = 1 << 16
_POLICY = ("collect rollouts", "update policy")


class StageProcess:
    """One child; it is started with its first stage, and again after it was ended."""

    def __init__(self) -> None:
        self.last_stage: str | None = None
        self._busy = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._said: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[bytes] | None = None

    def carry_out(self, call: StageCall, timeout: float | None, listener: ProgressReporter) -> StageOutcome:
        """Do a stage in the child.

        Args:
            call: the stage.
            timeout: seconds, from when the child is ready; None: no limit.
            listener: hears of its progress.

        Raises:
            StageTimeoutError: it was over its time; the child is gone.
            LostStageError: the child died; with the end of what it said.
            StageGivenUpError: the child was ended by `end`.
            OSError: it cannot be started.
        """
        # One at a time: whoever listens takes the next outcome for that of his own stage.
        with self._busy:
            return self._carry_out(call, timeout, listener)

    def _carry_out(self, call: StageCall, timeout: float | None, listener: ProgressReporter) -> StageOutcome:
        self.last_stage = call.stage
        child = self._ready_child()
        assert self._errors is not None
        self._errors.truncate(0)
        limit = None if timeout is None else time.monotonic() + timeout
        # Beside this thread: a call may be longer than what a pipe takes of a child that does not read.
        threading.Thread(target=_ask, args=(child.stdin, call.model_dump_json()), daemon=True).start()
        try:
            while True:
                said = self._hear(limit)
                if OUTCOME in said:
                    name, outcome = said[OUTCOME]
                    assert name == call.digest, "a child answers what it was asked last"
                    return self._checked(StageOutcome.model_validate_json(json.dumps(outcome)))
                if ADVANCE in said:
                    listener.advance(*said[ADVANCE])
                elif ANNOUNCE in said:
                    listener.log(said[ANNOUNCE])
        except queue.Empty:
            self.end()
            raise StageTimeoutError(f"{call.stage} was ended: not done after {timeout:g} s") from None
        except BaseException:
            # Whoever stops listening in the middle of a stage must not take its outcome for the next one's.
            self.end()
            raise

    def _checked(self, outcome: StageOutcome) -> StageOutcome:
        error = outcome.error
        if error is not None and not error.known and outcome.fault is None:
            # Nobody foresaw it, and it may be the process: a GPU that failed once fails in it for good.
            self.end()
        return outcome

    def _hear(self, limit: float | None) -> dict[str, Any]:
        """The next thing that the child says; queue.Empty after the limit."""
        child, line = self._child, None
        while True:
            # Before the wait: what it said at the end is heard.
            gone = child is None or _code_of(child) is not None
            left = SECONDS_BETWEEN_LOOKS if limit is None else max(0.0, limit - time.monotonic())
            try:
                line = self._said.get(timeout=min(left, SECONDS_BETWEEN_LOOKS))
                break
            except queue.Empty:
                if limit is not None and time.monotonic() >= limit:
                    raise
                # What it started may outlive it, and hold its end of the pipe.
                if gone:
                    break
        if line is None or not line.endswith("\n"):
            raise self._loss()
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _ready_child(self) -> subprocess.Popen[str]:
        if self._child is not None and _code_of(self._child) is None:
            return self._child
        self.end()
        self._said = queue.Queue()
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (lives as long as the child)
        try:
            self._child = child = _started(self._errors)
        except BaseException:
            self._errors.close()
            raise
        assert child.stdout is not None
        threading.Thread(target=_listen, args=(child.stdout, self._said), daemon=True).start()
        try:
            assert READY in self._hear(time.monotonic() + SECONDS_TO_START), "it says so first"
        except queue.Empty:
            self.end()
            raise LostStageError(f"a process for stages did not start in {SECONDS_TO_START:g} s") from None
        except BaseException:
            self.end()
            raise
        return child

    def _loss(self) -> Exception:
        """Why nothing more is heard."""
        child, errors = self._child, self._errors
        if child is None or errors is None or errors.closed:
            return StageCancelledError("its process was ended from here")
        limit = time.monotonic() + SECONDS_TO_END
        while (code := _code_of(child)) is None:
            if time.monotonic() > limit:
                return LostStageError("the process that did it does not answer any more")
            time.sleep(0.01)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        said = errors.read().decode(errors="replace").strip().splitlines()[-STDERR_TAIL_LINES:]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        cause = "; the machine's memory may have run out" if code == -signal.SIGKILL else ""
        return LostStageError(f"the process that did it ended {how}{cause}" + "".join(f"\n{line}" for line in said))

    def end(self) -> None:
        """Kill the child and all that it started; the next stage starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        _kill_family(child)
        child.wait()
        for stream in (child.stdin, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _started(errors: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment(),
        # The whole group is ended at once, and an interrupt in the terminal is for this process alone.
        start_new_session=True,
        encoding="utf-8",
    )


def _code_of(child: subprocess.Popen[str]) -> int | None:
    """Its exit code, negative for a signal, or None while it lives.

    It is not waited for: until `end` has killed what it started, its number must not become another's.
    """
    try:
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # `end` was called meanwhile.
        return child.wait()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill_family(child: subprocess.Popen[str]) -> None:
    """Kill the child, its group, and what it started in groups of their own, such as the processes of an update."""
    if child.returncode is not None:
        # Somebody has waited for it, and its number may be another's by now.
        return
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _ask(stream: IO[str], call: str) -> None:
    # Whoever listens hears that the child is gone, or has ended it.
    with contextlib.suppress(BrokenPipeError, ValueError):
        stream.write(call + "\n")
        stream.flush()


def _listen(stream: IO[str], said: queue.Queue[str | None]) -> None:
    # It is closed here: closing would wait for a read that is under way.
    with stream:
        for line in stream:
            said.put(line)
    said.put(None)


_CHOOSING = threading.Lock()
_IDLE: dict[str, list[StageProcess]] = {}
_ALL: list[StageProcess] = []


@contextlib.contextmanager
def borrowed_process(call: StageCall) -> Iterator[StageProcess]:
    """A child that is doing nothing; of several the one that did this stage last.

    Rollouts and updates share one, and so its model, as long as they take turns.
    """
    group = "policy" if call.stage in _POLICY else f"{call.stage} {call.arguments.get('section')}"
    with _CHOOSING:
        idle = sorted(_IDLE.setdefault(group, []), key=lambda process: process.last_stage != call.stage)
        if idle:
            process = idle[0]
            _IDLE[group].remove(process)
        else:
            process = StageProcess()
            _ALL.append(process)
    try:
        yield process
    finally:
        with _CHOOSING:
            _IDLE[group].append(process)


def close_stage_processes() -> None:
    """End every child; the next stage starts another."""
    with _CHOOSING:
        processes = list(_ALL)
    for process in processes:
        process.end()


atexit.register(close_stage_processes)
