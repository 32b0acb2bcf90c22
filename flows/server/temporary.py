"""The server that Prefect starts for a single run ends with that run, even if the run is killed.

Prefect stops it when the interpreter exits, which SIGKILL prevents. So a small process waits until a pipe from this one
closes, and then ends the server.
"""

import atexit
import subprocess
import sys
from functools import cache

from prefect.server.api.server import SubprocessASGIServer

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


def end_temporary_server_with_this_process() -> None:
    """Start the watcher if this process has started a server; once per server."""
    server = SubprocessASGIServer().server_process
    if server is not None and sys.platform == "linux":
        _watch(server.pid)


@cache
def _watch(server: int) -> None:
    # In its own session: Ctrl-C in the terminal must not end the watcher.
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCH, str(server)], stdin=subprocess.PIPE, start_new_session=True
    )
    atexit.register(_dismiss, watcher)


def _dismiss(watcher: "subprocess.Popen[bytes]") -> None:
    watcher.kill()
    watcher.communicate()
