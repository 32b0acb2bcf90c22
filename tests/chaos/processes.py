"""Processes of the command line that can be killed, forked from one that has imported everything."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.operations import Operation


@dataclass(frozen=True)
class Order:
    """One start of the command line.

    Attributes:
        arguments: those of `grpo`.
        root: storage root; operations below it are counted.
        scratch: folder for the output and the census.
        fatal: operation before which the process kills itself.
    """

    arguments: Sequence[str]
    root: Path
    scratch: Path
    fatal: Operation | None = None

    @property
    def output(self) -> Path:
        return self.scratch / "output"

    @property
    def census(self) -> Path:
        return self.scratch / "census"

    def killed_at(self, operation: Operation | None) -> "Order":
        """The same, which kills itself before this operation."""
        return replace(self, fatal=operation)

    def request(self) -> dict[str, Any]:
        fatal = [self.fatal.name, self.fatal.number] if self.fatal else None
        paths = {"output": self.output, "census": self.census, "root": self.root}
        return {"fatal": fatal, **{name: str(path) for name, path in paths.items()}}


class ForkServer:
    """The process that forks; `environment` is what all of its children run under."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._codes: dict[int, int] = {}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.fork_server"],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )

    def ready(self) -> None:
        """Wait for its imports."""
        threads = self._receive(600)["threads"]
        assert threads == 1, f"{threads} threads of Python in the process that forks"

    def start(self, order: Order) -> "Process":
        self._send({"arguments": list(order.arguments), **order.request()})
        while True:
            said = self._receive(600)
            if "code" not in said:
                return Process(said["pid"], self)
            self._codes[said["pid"]] = said["code"]

    def code_of(self, pid: int, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        while pid not in self._codes:
            said = self._receive(max(0.0, until - time.monotonic()))
            if not said:
                return None
            self._codes[said["pid"]] = said["code"]
        return self._codes[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _receive(self, seconds: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], seconds)[0]:
            return {}
        line = stream.readline()
        assert line, "the process that forks is gone"
        said: dict[str, Any] = json.loads(line)
        return said


@dataclass(frozen=True)
class Process:
    """A forked process, the first of a group of its own."""

    pid: int
    server: ForkServer

    def wait(self, seconds: float) -> int | None:
        """Its exit code, negative for a signal; None while it lives after so many seconds."""
        return self.server.code_of(self.pid, seconds)


def kill(process: Process, *, alone: bool) -> None:
    """SIGKILL to the process, or to its whole group."""
    with contextlib.suppress(ProcessLookupError):
        if alone:
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def forking(environment: Mapping[str, str], log: Path) -> Iterator[ForkServer]:
    """A fork server that ends with its context."""
    server = ForkServer(environment, log)
    try:
        server.ready()
        yield server
    finally:
        server.close()
