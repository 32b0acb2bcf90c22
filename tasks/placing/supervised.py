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

from tasks.checkout import environment
from tasks.placing.call import StageCall, StageOutcome
from tasks.placing.faults import LostStageError, StageTimeoutError
from tasks.progress import Listener

ADVANCE, ANNOUNCE, OUTCOME, READY = "advance", "announce", "outcome", "ready"
SECONDS_TO_START = 600.0
TOLD_LINES = 30
_POLICY = ("collect rollouts", "update policy")


class StageProcess:
    """One child; it is started with its first stage, and again after it was ended."""

    def __init__(self) -> None:
        self.last_stage: str | None = None
        self._busy = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._said: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[bytes] | None = None

    def carry_out(self, call: StageCall, timeout: float | None, listener: Listener) -> StageOutcome:
        """Do a stage in the child.

        Args:
            call: the stage.
            timeout: seconds, from when the child is ready; None: no limit.
            listener: hears of its progress.

        Raises:
            StageTimeoutError: it was over its time; the child is gone.
            LostStageError: the child died; with the end of what it said.
        """
        # One at a time: whoever listens takes the next outcome for that of his own stage.
        with self._busy:
            return self._carry_out(call, timeout, listener)

    def _carry_out(self, call: StageCall, timeout: float | None, listener: Listener) -> StageOutcome:
        self.last_stage = call.stage
        child = self._ready_child()
        assert child.stdin is not None
        assert self._errors is not None
        self._errors.truncate(0)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(call.model_dump_json() + "\n")
            child.stdin.flush()
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                said = self._hear(limit)
                if OUTCOME in said:
                    name, outcome = said[OUTCOME]
                    assert name == call.digest, "a child answers what it was asked last"
                    return StageOutcome.model_validate_json(json.dumps(outcome))
                if ADVANCE in said:
                    listener.advance(*said[ADVANCE])
                elif ANNOUNCE in said:
                    listener.announce(said[ANNOUNCE])
        except queue.Empty:
            self.end()
            raise StageTimeoutError(f"{call.stage} was ended: not done after {timeout:g} s") from None
        except BaseException:
            # Whoever stops listening in the middle of a stage must not take its outcome for the next one's.
            self.end()
            raise

    def _hear(self, limit: float | None) -> dict[str, Any]:
        """The next thing that the child says; queue.Empty after the limit."""
        line = self._said.get(timeout=None if limit is None else max(0.0, limit - time.monotonic()))
        if line is None:
            child, errors = self._child, self._errors
            ended = child is None or errors is None or errors.closed
            raise LostStageError("its process was ended from here" if ended else self._last_words())
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _ready_child(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.end()
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (lives as long as the child)
        self._said = queue.Queue()
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "tasks.placing.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(),
            # The whole group is ended at once, and an interrupt in the terminal is for this process alone.
            start_new_session=True,
            text=True,
        )
        assert child.stdout is not None
        threading.Thread(target=_listen, args=(child.stdout, self._said), daemon=True).start()
        try:
            assert READY in self._hear(time.monotonic() + SECONDS_TO_START), "it says so first"
        except queue.Empty:
            self.end()
            raise LostStageError(f"a process for stages did not start in {SECONDS_TO_START:g} s") from None
        return child

    def _last_words(self) -> str:
        assert self._child is not None
        assert self._errors is not None
        code = self._child.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()[-TOLD_LINES:]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        cause = "; the machine's memory may have run out" if code == -signal.SIGKILL else ""
        return f"the process that did it ended {how}{cause}" + "".join(f"\n{line}" for line in said)

    def end(self) -> None:
        """Kill the child and all that it started; the next stage starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _listen(stream: IO[str], said: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # the stream was closed by the one who ended the child
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
        _ALL.clear()
        for idle in _IDLE.values():
            idle.clear()
    for process in processes:
        process.end()


atexit.register(close_stage_processes)
