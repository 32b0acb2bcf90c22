"""`grpo ui` in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_STARTING_SECONDS = 120.0


class GrpoUi:
    """The command, which can be killed and started again on the same port; it writes to Prefect's home."""

    def __init__(self, home: Path, environment: Mapping[str, str], *arguments: str) -> None:
        home.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._home, self._arguments = home, arguments
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.environment = inherited | {"PREFECT_HOME": str(home)} | dict(environment)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def said(self) -> str:
        """Everything that it wrote to stdout and stderr."""
        return (self._home / "said").read_text()

    def start(self) -> None:
        """Start it, and wait until it says how it is reached."""
        before = self.said.count("export PREFECT_API_URL") if (self._home / "said").exists() else 0
        command = [sys.executable, "-m", "flows.command_line.main", "ui", "--port", str(self.port), *self._arguments]
        with (self._home / "said").open("ab") as said:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=said, stderr=said, start_new_session=True
            )
        deadline = time.monotonic() + _STARTING_SECONDS
        while self.said.count("export PREFECT_API_URL") == before:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code, negative if the signal ended it."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def group_is_gone(self) -> bool:
        """Whether no process that it started is left."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@contextmanager
def grpo_ui(home: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[GrpoUi]:
    """A running server, ended afterwards."""
    ui = GrpoUi(home, environment, *arguments)
    try:
        ui.start()
        yield ui
    finally:
        if ui.process is not None and ui.process.poll() is None:
            ui.end(signal.SIGKILL)
