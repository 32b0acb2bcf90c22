"""Child processes that answer requests, keep their model between them, and can be killed at any moment.

Parent and child exchange JSON, one object per line: requests on the child's standard input, answers on its standard
output. Stages with a timeout, rewards in separate processes and the processes of devices all run in these.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from tasks.execution.child_main import ADVANCE, ERROR, LOG, OUTCOME, READY
from tasks.execution.errors import ErrorRecord, LostStageError, StageCancelledError, StageTimeoutError
from tasks.process import environment, exit_code, kill_family
from tasks.progress import ProgressReporter

SECONDS_TO_START = 600.0
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_END = 5.0
STDERR_TAIL_LINES = 30
STDERR_TAIL_BYTES = 1 << 16


class ChildProcess:
    """One child; the first request starts it, and so does the first one after it has ended.

    Its command is given as arguments of the Python interpreter, its variables are added to this process's, and errors
    call it by its name. `starts` counts how often it was started.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None, name: str = "its process"
    ) -> None:
        self.command, self.variables, self.name, self.starts = tuple(command), variables or {}, name, 0
        self.last_label: str | None = None
        self._busy = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[bytes] | None = None

    def request(self, label: str, payload: Any, timeout: float | None, reporter: ProgressReporter) -> Any:
        """Have the child's handler turn one JSON value into another; requests of several threads take turns.

        `label` says what is done; `ChildProcesses.borrow` prefers a child that did the same last. The timeout in
        seconds
        counts from when the child is ready.

        Raises:
            StageTimeoutError: the timeout passed; the child was killed.
            LostStageError: the child died; with the last lines of its standard error.
            StageCancelledError: the child was ended by `end`.
            Exception: what the handler raised, as ErrorRecord rebuilds it.
        """
        with self._busy:
            self.last_label = label
            child = self._ready_child()
            assert self._stderr is not None
            self._stderr.truncate(0)
            deadline = None if timeout is None else time.monotonic() + timeout
            # In a thread: a request may exceed a pipe's buffer while the child does not read.
            threading.Thread(target=_write_line, args=(child.stdin, json.dumps(payload)), daemon=True).start()
            try:
                kind, value = self._answer(deadline, reporter)
            except queue.Empty:
                self.end()
                raise StageTimeoutError(f"killed, since it was not done after {timeout:g} s") from None
            except BaseException:
                # Later answers to this request must not be read as answers to the next.
                self.end()
                raise
            if kind == OUTCOME:
                return value
            raise self.failure(ErrorRecord.model_validate_json(json.dumps(value)))

    def failure(self, record: ErrorRecord) -> Exception:
        """Build what a request raises, and end a child that may have become unusable."""
        if not record.is_foreseen:
            # A GPU that failed once in a process keeps failing in it.
            self.end()
        return record.error()

    def _answer(self, deadline: float | None, reporter: ProgressReporter) -> tuple[str, Any]:
        """Pass progress on until the outcome or the error comes; queue.Empty once the deadline has passed."""
        while True:
            for kind, value in self._next_message(deadline).items():
                if kind in (OUTCOME, ERROR):
                    return kind, value
                if kind == ADVANCE:
                    reporter.advance(*value)
                elif kind == LOG:
                    reporter.log(value)

    def _next_message(self, deadline: float | None) -> dict[str, Any]:
        """Wait for the child's next line; queue.Empty once the deadline has passed."""
        child = self._child
        while True:
            # Checked before the wait, so that its last line is still read.
            ended = child is None or exit_code(child) is not None
            left = SECONDS_BETWEEN_CHECKS if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                line = self._lines.get(timeout=min(left, SECONDS_BETWEEN_CHECKS))
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                # A grandchild may outlive the child, and keep its end of the pipe open.
                if ended:
                    raise self.loss() from None
                continue
            if line is None or not line.endswith("\n"):
                raise self.loss()
            message: dict[str, Any] = json.loads(line)
            return message

    @property
    def is_running(self) -> bool:
        """Whether the next request would find a child."""
        return self._child is not None and exit_code(self._child) is None

    def _ready_child(self) -> subprocess.Popen[str]:
        if self._child is not None and exit_code(self._child) is None:
            return self._child
        self.end()
        self.starts += 1
        self._lines = queue.Queue()
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (open as long as the child runs)
        try:
            self._child = child = subprocess.Popen(
                [sys.executable, *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment(**self.variables),
                # The whole group is killed at once, and Ctrl-C in the terminal is for this process alone.
                start_new_session=True,
                encoding="utf-8",
            )
        except BaseException:
            self._stderr.close()
            raise
        threading.Thread(target=_read_lines, args=(child.stdout, self._lines), daemon=True).start()
        try:
            message = self._next_message(time.monotonic() + SECONDS_TO_START)
            if ERROR in message:
                raise self.failure(ErrorRecord.model_validate_json(json.dumps(message[ERROR])))
            assert READY in message, "a child first reports that it is ready"
        except queue.Empty:
            self.end()
            raise LostStageError(f"a child process did not start in {SECONDS_TO_START:g} s") from None
        except BaseException:
            self.end()
            raise
        return child

    def loss(self) -> Exception:
        """Say why the child's answers have ended."""
        child, stderr = self._child, self._stderr
        if child is None or stderr is None or stderr.closed:
            return StageCancelledError(f"{self.name} was ended by this one")
        deadline = time.monotonic() + SECONDS_TO_END
        while (code := exit_code(child)) is None:
            if time.monotonic() > deadline:
                return LostStageError(f"{self.name} has closed its output and does not answer")
            time.sleep(0.01)
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        tail = stderr.read().decode(errors="replace").strip().splitlines()[-STDERR_TAIL_LINES:]
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        cause = "; the machine's memory may have run out" if code == -signal.SIGKILL else ""
        return LostStageError(f"{self.name} ended {how}{cause}" + "".join(f"\n{line}" for line in tail))

    def end(self) -> None:
        """Kill the child and every process that it started; the next request starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        kill_family(child)
        child.wait()
        for stream in (child.stdin, self._stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _write_line(stream: IO[str], line: str) -> None:
    # The thread that waits for the answer sees that the child is gone, or has been ended.
    with contextlib.suppress(BrokenPipeError, ValueError):
        stream.write(line + "\n")
        stream.flush()


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    # Closed here: closing from another thread would wait for a read that is under way.
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


class ChildProcesses:
    """The child processes of a run, by what they keep loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[ChildProcess]] = {}
        self._all: list[ChildProcess] = []

    @contextlib.contextmanager
    def borrow(
        self, group: str, label: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> Iterator[ChildProcess]:
        """Lend an idle child of a group, with one command, preferably the one that last did `label`; else start one."""
        with self._lock:
            idle = sorted(self._idle.setdefault(group, []), key=lambda each: each.last_label != label)
            if idle:
                process = idle[0]
                self._idle[group].remove(process)
            else:
                process = ChildProcess(command, variables)
                self._all.append(process)
        try:
            yield process
        finally:
            with self._lock:
                self._idle[group].append(process)

    def close(self) -> None:
        """Kill every child."""
        for process in list(self._all):
            process.end()
