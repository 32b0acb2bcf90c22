"""Servers that this process starts for itself: awaited until they answer, and ended with it.

A server ends when the pipe to its standard input closes, which the system does even if this process is killed. A
program that does not watch its standard input is started by `guarded_command`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

from tasks.process import exit_code, kill_family
from tasks.progress import SECONDS_BETWEEN_LINES, log

_GUARD = Path(__file__).with_name("guard_main.py")
_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16
_SECONDS_BETWEEN_LOOKS = 0.25


class SlowStartError(RuntimeError):
    """A server runs and did not answer in time; another start may be faster."""


def guarded_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one, and ends it and all that it started when the standard input closes."""
    # Isolated, so that what a checkout has in its folder or in PYTHONPATH reaches neither the guard nor the program.
    return [sys.executable, "-I", str(_GUARD), *command]


def free_port() -> int:
    """Return a port of the loopback address on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback address."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class ServerProcess:
    """The process of a server on the loopback address, started at once, which messages call by its title.

    It ends when its standard input closes, writes to `log_file`, and answers 200 at `health` once it is ready.
    """

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: IO[bytes],
        port: int,
        health: str,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.title, self.port = title, port
        self._command, self._environment, self._pass_fds = list(command), environment, tuple(pass_fds)
        self._log, self._health = log_file, health
        try:
            self.process = self._started()
        except BaseException:
            log_file.close()
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=dict(self._environment),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=self._pass_fds,
            # Ctrl-C in the terminal ends the run, which still has to report that.
            start_new_session=True,
        )

    def close(self) -> None:
        """Have the server end, without waiting for it."""
        self._close_pipe()
        self._log.close()

    def _close_pipe(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def is_running(self) -> bool:
        """Whether the process lives; it may not answer yet."""
        return exit_code(self.process) is None

    def wait_until_ready(self, seconds: float) -> None:
        """Return once the server answers, with a log line every half minute; SlowStartError or RuntimeError if not."""
        begun = time.monotonic()
        lines = 0

        def is_over() -> bool:
            nonlocal lines
            waited = time.monotonic() - begun
            if waited > (lines + 1) * SECONDS_BETWEEN_LINES:
                lines += 1
                log(f"{self.title} is starting: {waited:.0f} s")
            return not self.is_running or waited > seconds

        while not self._answers(is_over):
            if is_over():
                slow = self.is_running
                how = f"did not answer in {seconds:g} s" if slow else self.how_it_ended()
                message = "\n".join([f"{self.title} {how}", *self.log_tail()])
                self.close()
                raise SlowStartError(message) if slow else RuntimeError(message)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def answers(self, seconds: float) -> bool:
        """Return whether the server says within so many seconds that it is well."""
        until = time.monotonic() + seconds
        return self._answers(lambda: not self.is_running or time.monotonic() > until)

    def _answers(self, is_over: Callable[[], bool]) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_BETWEEN_LINES)
        try:
            # Where the system accepts connections from the beginning, their requests wait until the server takes them.
            connection.request("GET", self._health)
            answered = select.poll()
            answered.register(connection.sock, select.POLLIN)
            while not answered.poll(1000 * _SECONDS_BETWEEN_LOOKS):
                if is_over():
                    return False
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def log_lines(self) -> list[str]:
        """Return the end of the server's log."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").splitlines()

    def log_tail(self) -> list[str]:
        """Return the last lines of the log, which tell why the server failed."""
        return self.log_lines()[-_LOG_TAIL_LINES:]

    def how_it_ended(self) -> str:
        """Wait for the end of the process, kill what it left running, and say how it ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        kill_family(self.process)
        code = self.process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
