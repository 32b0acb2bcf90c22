"""The server of a run: one, started again when it died, and gone with the run, whatever was killed."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_core.errors import InputError
from tasks.execution import server_process
from tasks.execution.errors import LostStageError
from tasks.rollouts import vllm_server
from tasks.rollouts.vllm_server import PLACE, VllmServer
from tasks.runs.layout import VLLM_LOG
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import heard_of

# As vLLM's: it starts a process of its own, which ignores that its parent has died and that it should end.
ENGINE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
PROGRAM = f"""
import http.server, json, os, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], stdout=subprocess.PIPE)
engine.stdout.readline()

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if well or self.path != "/health" else 503)
        self.end_headers()
        told = dict(pids=[os.getpid(), engine.pid], path=os.environ.get("PYTHONPATH"), arguments=sys.argv[1:])
        self.wfile.write(json.dumps(told).encode())

    def do_POST(self):
        global well
        well = False
        self.do_GET()

well = True
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
COMMAND = (sys.executable, "-c", PROGRAM)
SECONDS = 60.0
RUN = """
import sys
from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.store import ArtifactStore

print(VllmServer().ensure_running(sys.argv[2:], ArtifactStore(sys.argv[1], "run"), 60.0), flush=True)
sys.stdin.read()
"""


def told(url: str) -> dict[str, object]:
    """What the server that answers says of itself."""
    with urllib.request.urlopen(f"{url}/", timeout=SECONDS) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def processes(url: str) -> list[psutil.Process]:
    """The server, its engine, and the guard over both."""
    pids = told(url)["pids"]
    assert isinstance(pids, list)
    server, engine = map(psutil.Process, pids)
    return [server, engine, psutil.Process(server.ppid())]


def are_gone(found: list[psutil.Process]) -> bool:
    return psutil.wait_procs(found, timeout=30)[1] == []


def await_end(child: psutil.Process) -> None:
    """Return when a child of this process has ended; its exit code stays for who started it."""
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def kill_guard(url: str) -> list[psutil.Process]:
    """Kill the guard; the server, its engine, and what is left of the guard."""
    found = processes(url)
    found[2].kill()
    await_end(found[2])
    return found


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server_process, vllm_server):
        monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "runs"), "run")


@pytest.fixture
def server() -> Iterator[VllmServer]:
    server = VllmServer()
    yield server
    server.close()


def test_a_run_has_one_server_which_ends_with_it(server: VllmServer, store: ArtifactStore, tmp_path: Path) -> None:
    assert os.environ["PYTHONPATH"]
    url = server.ensure_running(COMMAND, store, SECONDS)
    first = processes(url)
    assert server.ensure_running(list(COMMAND), store, SECONDS) == url
    assert processes(url) == first
    # The checkout's packages are not the server's.
    assert told(url)["path"] is None
    other = server.ensure_running((*COMMAND, "--model", "b", "--port={port}", "--port", "{port}"), store, SECONDS)
    assert are_gone(first)
    port = other.rpartition(":")[2]
    # Without an address vLLM listens on every interface.
    host = ["--host", "127.0.0.1"]
    assert told(other)["arguments"] == ["--model", "b", f"--port={port}", "--port", port, *host]
    second = processes(other)
    server.close()
    assert are_gone(second)
    assert '"GET /health HTTP/1.1" 200' in (tmp_path / "runs" / "run" / VLLM_LOG).read_text()


def test_a_server_that_dies_is_started_again(
    server: VllmServer, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_SECONDS_TO_LIVE", 0.0)
    url = server.ensure_running(COMMAND, store, SECONDS)
    for killed in ([0], [1, 0], [2], [0, 1, 2]):
        before = processes(url)
        for index in killed:
            # The guard may have ended it already.
            with contextlib.suppress(psutil.NoSuchProcess):
                before[index].kill()
        await_end(before[2])
        again, heard = heard_of(lambda: server.ensure_running(COMMAND, store, SECONDS))
        assert again == url
        assert are_gone(before)
        assert ["SIGKILL" in line for line in heard.lines] == [True]


def test_one_that_dies_again_at_once_is_lost_until_the_stage_is_retried(
    server: VllmServer, store: ArtifactStore
) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    kill_guard(url)
    assert server.ensure_running(COMMAND, store, SECONDS) == url
    found = kill_guard(url)
    with pytest.raises(LostStageError, match="SIGKILL"):
        server.ensure_running(COMMAND, store, SECONDS)
    assert are_gone(found)
    assert processes(server.ensure_running(COMMAND, store, SECONDS))


def test_a_server_that_is_not_well_is_started_again(server: VllmServer, store: ArtifactStore) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    first = processes(url)
    urllib.request.urlopen(f"{url}/", data=b"", timeout=SECONDS).close()
    assert server.ensure_running(COMMAND, store, SECONDS) == url
    assert are_gone(first)


def test_one_that_is_started_again_waits_for_its_port(server: VllmServer, store: ArtifactStore) -> None:
    url = server.ensure_running(COMMAND, store, SECONDS)
    assert are_gone(kill_guard(url)[:1])
    # As by a server that was killed and has not ended yet.
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))) as still_there:
        threading.Timer(1.0, still_there.close).start()
        assert server.ensure_running(COMMAND, store, SECONDS) == url


def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "runs"), *COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        found = processes(run.stdout.readline().strip())
        run.kill()
    assert are_gone(found)


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        ("raise SystemExit('no such model')", SECONDS),
        ("import os; os.kill(os.getpid(), 9)", SECONDS),
        ("import time; time.sleep(600)", 0.5),
    ],
)
def test_a_server_that_does_not_start_says_why(
    server: VllmServer, store: ArtifactStore, code: str, seconds: float
) -> None:
    command = (sys.executable, "-c", code)
    with pytest.raises((InputError, LostStageError)) as caught:
        server.ensure_running(command, store, seconds)
    if "model" in code:
        assert isinstance(caught.value, InputError)
        assert caught.value.place == PLACE
        assert "no such model" in caught.value.hint
    else:
        assert isinstance(caught.value, LostStageError)
    # The next attempt is a new one.
    assert server.ensure_running(COMMAND, store, SECONDS)


def test_a_bucket_gets_the_log_of_a_server_that_does_not_start(server: VllmServer) -> None:
    store = ArtifactStore("memory://served", "run")
    with pytest.raises(InputError):
        server.ensure_running((sys.executable, "-c", "raise SystemExit('no such model')"), store, SECONDS)
    assert store.read_file(VLLM_LOG) == b"no such model\n"


def test_what_cannot_start_is_refused(
    server: VllmServer, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_SECONDS_TO_END", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (("/nowhere/vllm", "serve"), (*COMMAND, "--port", port), (*COMMAND, "--port", "x")):
            with pytest.raises(InputError) as caught:
                server.ensure_running(command, store, SECONDS)
            assert caught.value.place == PLACE
            assert str(caught.value.value).startswith(" ".join(command))


def test_the_last_lines_of_a_log_are_what_failed() -> None:
    frame = '(EngineCore pid=7) ERROR 11-27 13:05:11 [core.py:402]   File "/vllm/core.py", line 12, in run\n'
    log = f"(Worker pid=3) INFO 11-27 13:05:11 [a.py:1] Loading\nTraceback (most recent call last):\n{frame}    run()\n"
    log += "ValueError: too small\n(APIServer pid=2) ValueError: too small\n\n"
    assert vllm_server.condensed(log.splitlines()) == ["Loading", "ValueError: too small"]
