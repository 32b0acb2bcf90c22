"""The vLLM server that a run starts for itself by `rollout.vllm.command`, in an environment of its own.

One server serves all stages of a run. Its log is in the run's folder; it is started again when it died, and it ends
with the run, however that ends: `tasks.execution.server_process`.
"""

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

from grpo_core.errors import InputError
from tasks.execution.errors import LostStageError
from tasks.execution.server_process import ServerProcess, SlowStartError, free_port, guarded_command, is_free
from tasks.process import kill_family
from tasks.progress import log
from tasks.runs.layout import VLLM_LOG
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import is_local

PLACE = "rollout.vllm.command"
HOST, PORT = "127.0.0.1", "{port}"
_SECONDS_TO_END = 15.0  # the guard gives the server 10 s before it kills it
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_LIVE = 30.0  # a server that has died sooner after it was started again would die once more
_SECONDS_BETWEEN_LOOKS = 0.1
_WITHOUT = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would let packages of this environment, or this checkout, into the server's."""
_SETTINGS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
# What a line begins with: the process, the level, the time and the place in vLLM's sources.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_FRAME = re.compile(r'File ".*", line \d+')
_NOISE = re.compile(_FRAME.pattern + r"|Traceback |During handling|The above exception|warnings\.warn|\[-|[^A-Za-z]*$")
_SAID_LINES = 8


class VllmServer:
    """The vLLM server of a run, of which `resource(VllmServer)` is the only one in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _VllmProcess | None = None
        self._command: tuple[str, ...] = ()

    def ensure_running(self, command: Sequence[str], store: ArtifactStore, seconds: float) -> str:
        """Start the server unless it runs by this command; return its address once it answers in these seconds.

        `{port}` in the command becomes a free port, and where no port is given, one is appended. InputError if it
        cannot
        start or ends, LostStageError if it does not answer in time, was killed, or died again soon after a restart.
        """
        with self._lock:
            process = self._process
            if process is not None and self._command != tuple(command):
                process.end()
                process = self._process = None
            try:
                if process is None:
                    process = self._process = _start(command, store)
                    self._command = tuple(command)
                    process.wait_until_ready(seconds)
                elif not process.is_running or not process.answers(_SECONDS_TO_ANSWER):
                    process.start_again(seconds)
            except BaseException:
                # The next call starts another one.
                if self._process is not None:
                    self._process.end()
                self._process = None
                raise
            return f"http://{HOST}:{process.port}"

    def close(self) -> None:
        """End the server, and return when it has ended."""
        with self._lock:
            if self._process is not None:
                self._process.end()
            self._process = None


class _VllmProcess(ServerProcess):
    """The process of a vLLM server by its complete command, whose failures are errors of a stage."""

    def __init__(self, command: Sequence[str], port: int, store: ArtifactStore) -> None:
        self._shown, self._store, self._again = " ".join(command), store, float("-inf")
        environment = {name: value for name, value in os.environ.items() if name not in _WITHOUT}
        guarded = guarded_command(command)
        super().__init__("the vLLM server", guarded, {**_SETTINGS, **environment}, _log_file(store), port, "/health")

    def _started(self) -> subprocess.Popen[bytes]:
        until = time.monotonic() + _SECONDS_TO_END
        # The server of a run that was killed, or the one before, may still be about to end.
        while not is_free(self.port):
            if time.monotonic() > until:
                hint = f"Another program listens on port {self.port}. End it, give another port, or leave the port out."
                raise InputError(PLACE, self._shown, hint)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return super()._started()

    def wait_until_ready(self, seconds: float) -> None:
        try:
            super().wait_until_ready(seconds)
        except RuntimeError as error:
            if isinstance(error, SlowStartError) or (self.process.returncode or 0) < 0:
                raise LostStageError(str(error)) from error
            hint = f"{error}\nThe complete log is {VLLM_LOG} in the run's folder."
            raise InputError(PLACE, self._shown, hint) from error

    def start_again(self, seconds: float) -> None:
        """Start the server once more, on the same port, and return once it answers; LostStageError if it dies again."""
        # Without its engine it lives, answers 503 for a while, and loads nothing.
        kill_family(self.process)
        how = self.how_it_ended()
        if time.monotonic() - self._again < _SECONDS_TO_LIVE:
            raise LostStageError(f"{self.title} {how} again")
        log(f"{self.title} {how}; starting it again, the run waits for it")
        self._close_pipe()
        self.process = self._started()
        try:
            super().wait_until_ready(seconds)
        except RuntimeError as error:
            raise LostStageError(str(error)) from error
        self._again = time.monotonic()

    def log_tail(self) -> list[str]:
        return condensed(self.log_lines())[-_SAID_LINES:]

    def close(self) -> None:
        """Have the server end, without waiting for it; in a bucket its log is stored now."""
        self._close_pipe()
        try:
            if not is_local(self._store.filesystem) and not self._log.closed:
                self._log.seek(0)
                self._store.write_file(VLLM_LOG, self._log.read())
        finally:
            super().close()

    def end(self) -> None:
        """End the server, and return when it has ended."""
        try:
            self.close()
        finally:
            self._await_end()

    def _await_end(self) -> None:
        until = time.monotonic() + _SECONDS_TO_END
        while self.is_running and time.monotonic() < until:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        # Of a guard that was killed, the server is still there.
        kill_family(self.process)
        self.process.wait()


def condensed(log: Sequence[str]) -> list[str]:
    """Return lines of vLLM's log without repetitions, and without the frames of its processes' tracebacks."""
    plain = [_PREFIX.sub("", line).strip() for line in log]
    # Below each frame is its line of source.
    said = [line for above, line in pairwise(["", *plain]) if not _NOISE.match(line) and not _FRAME.match(above)]
    return list(dict.fromkeys(said))


def _start(command: Sequence[str], store: ArtifactStore) -> _VllmProcess:
    if shutil.which(command[0]) is None:
        hint = f"There is no program {command[0]}: correct its path, or make its environment."
        raise InputError(PLACE, " ".join(command), hint)
    given = _given_port(command)
    port = free_port() if given is None else given
    words = [*command]
    if not any(word.partition("=")[0] == "--host" for word in command):
        # By default vLLM listens on every interface.
        words += ["--host", HOST]
    if given is None and not any(PORT in word for word in command):
        words += ["--port", PORT]
    return _VllmProcess([word.replace(PORT, str(port)) for word in words], port, store)


def _given_port(command: Sequence[str]) -> int | None:
    following = [after for option, after in pairwise(command) if option == "--port"]
    joined = [option.partition("=")[2] for option in command if option.startswith("--port=")]
    given = [value for value in (*following, *joined) if value != PORT]
    if given and not given[-1].isdigit():
        raise InputError(PLACE, " ".join(command), f"What follows --port is the number of a port, or {PORT}.")
    return int(given[-1]) if given else None


def _log_file(store: ArtifactStore) -> IO[bytes]:
    if not is_local(store.filesystem):
        return tempfile.TemporaryFile()
    path = Path(store.path(VLLM_LOG))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+b")
