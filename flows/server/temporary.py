"""The server that Prefect starts for a single run ends with that run, even if the run is killed.

Prefect stops it when the interpreter exits, which SIGKILL prevents. So a small process waits until a pipe from this one
closes, and then ends the server.
"""

import atexit
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from prefect.settings import get_current_settings

# A handle instead of a process id, which may be another process's by then.
_WATCH = """
import os, signal, sys
server = os.pidfd_open(int(sys.argv[1]))
sys.stdin.buffer.read()
try:
    signal.pidfd_send_signal(server, signal.SIGTERM)
except ProcessLookupError:
    pass
"""


@contextlib.contextmanager
def ending_with_temporary_server() -> Iterator[None]:
    """End the server that this process has started with it, and do not wait for one that has ended first.

    A signal to the whole group, as Ctrl-C in a terminal, ends both at once. Prefect would then try each last request,
    and each batch of logs, for minutes.
    """
    # Prefect imports it to start one. Importing it here would cost seconds, also where a server is running already.
    module = sys.modules.get("prefect.server.api.server")
    server = module.SubprocessASGIServer().server_process if module is not None else None
    if server is None:
        yield
        return
    if sys.platform == "linux":
        _watch(server.pid)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) or server.poll() is not None:
            # For the rest of this process, in all of its threads.
            get_current_settings().client.max_retries = 1
        raise


@cache
def _watch(server: int) -> None:
    # In its own session: Ctrl-C in the terminal must not end the watcher.
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCH, str(server)], stdin=subprocess.PIPE, start_new_session=True
    )
    # The last one that is registered is called first.
    atexit.register(watcher.communicate)
    atexit.register(watcher.kill)
