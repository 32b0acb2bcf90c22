"""A server for the runs of this process: started beside the imports, ended with the process, even if that is killed.

Prefect would start one at its first request, and import its whole server into this process for that.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import IO

_PROGRAM = """
import gc, os, signal, socket, sys, threading

def end_with_parent():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
# What the imports make stays.
gc.disable()
import uvicorn
from prefect.server.api.server import create_app

config = uvicorn.Config(create_app(), lifespan="on", log_level="error", timeout_graceful_shutdown=5)
gc.freeze()
gc.enable()
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
"""

# As Prefect sets them for its own temporary server: no UI, and only the services that a single run needs.
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
_LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class TemporaryServer:
    """The server's process, which ends when the pipe to it is closed; its output is kept for messages."""

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]

    @property
    def api_url(self) -> str:
        """Value of PREFECT_API_URL for clients."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def close(self) -> None:
        """Have the server end, without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_until_ready(self, seconds: float) -> None:
        """Return once the server answers.

        Raises:
            RuntimeError: it has ended, or did not answer in time; with the last lines of its log.
        """
        # The system accepts connections from the beginning; their requests wait until the server takes them.
        connection = HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", "/api/health")
            answered = connection.getresponse().status == 200
        except (OSError, HTTPException):
            answered = False
        finally:
            connection.close()
        if not answered:
            how = f"did not answer in {seconds:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = f"ended with exit code {self.process.wait(1)}"
            self.close()
            with self.log:
                self.log.seek(0)
                tail = self.log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise RuntimeError("\n".join([f"Prefect's temporary server {how}", *tail]))


_server: TemporaryServer | None = None


def is_temporary(url: str) -> bool:
    """Whether this is the address of the server that this process has started."""
    return _server is not None and url == _server.api_url


def start_temporary_server() -> bool:
    """Start a server for this process, unless one is configured or has been started; returns before it answers.

    Returns:
        Whether this call started one.
    """
    global _server
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    has_ended = _server is not None and _server.ended and settings.api.url == _server.api_url
    if (settings.api.url and not has_ended) or not settings.server.ephemeral.enabled:
        return False
    environment = {**os.environ, **settings.to_environment_variables(exclude_unset=True), **_ENVIRONMENT}
    environment.pop("PREFECT_API_URL", None)
    _server = _start(environment)
    atexit.register(_server.close)
    # For all threads of this process, and for those that Prefect starts.
    os.environ["PREFECT_API_URL"] = _server.api_url
    refresh_global_settings_context()
    return True


def _start(environment: dict[str, str]) -> TemporaryServer:
    log = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server runs)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(listener.fileno())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[listener.fileno()],
            # Ctrl-C in the terminal ends the run, which still has to report that.
            start_new_session=True,
        )
        return TemporaryServer(process, int(listener.getsockname()[1]), log)


def wait_for_temporary_server() -> None:
    """Return once the server that this process has started answers; at once if there is none.

    Raises:
        RuntimeError: it did not start; with the last lines of its log.
    """
    if _server is not None:
        from prefect.settings import get_current_settings

        _server.wait_until_ready(get_current_settings().server.ephemeral.startup_timeout_seconds)


@contextlib.contextmanager
def not_waiting_for_ended_server() -> Iterator[None]:
    """When something fails since the temporary server has ended, send no request to it again and again for minutes."""
    try:
        yield
    except BaseException:
        if _server is not None and _server.ended:
            from prefect.settings import get_current_settings

            # For the rest of this process, in all of its threads.
            get_current_settings().client.max_retries = 1
        raise
