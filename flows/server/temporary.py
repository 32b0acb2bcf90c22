"""The server that Prefect starts for a single run ends with its run, also where the run is killed.

Prefect stops it when the interpreter exits; after SIGKILL nobody would, and it would stay, idle, with its memory. So a
small process waits for the end of this one, which it sees by a pipe that closes, and then ends the server.
"""

import atexit
import subprocess
import sys
from functools import cache

from prefect.server.api.server import SubprocessASGIServer

# A handle instead of a number: another process may have got the number by then.
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
    """Watch over the server that this process has started, if it has; where there is one already, nothing is done."""
    server = SubprocessASGIServer().server_process
    if server is not None and sys.platform == "linux":
        _watch(server.pid)


@cache
def _watch(server: int) -> None:
    # A session of its own: what a terminal sends to this process on Ctrl-C is not for the watcher.
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCH, str(server)], stdin=subprocess.PIPE, start_new_session=True
    )
    atexit.register(_dismiss, watcher)


def _dismiss(watcher: "subprocess.Popen[bytes]") -> None:
    watcher.kill()
    watcher.communicate()
