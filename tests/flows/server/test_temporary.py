"""The server of a single run does not outlive it, however the run ends."""

import contextvars
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.server import temporary
from flows.server.reachable import server_url
from flows.server.temporary import ServerLostError, TemporaryServer
from tasks.progress import listen
from tests.flows.conftest import Runs, Start, printed_summary, training_process
from tests.processes import ProgressLog

PROGRAM = """
import sys
from flows.prefect_settings import apply_settings
apply_settings()
from flows.server import temporary

assert [temporary.start_temporary_server(), temporary.start_temporary_server()] == [True, False]
print(temporary._server.process.pid, flush=True)
sys.stdin.read()
assert not any(name.startswith("prefect.server") for name in sys.modules)
"""


ANSWERS = """
import http.server, os, socket, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

    def log_message(self, *arguments):
        pass

listener = http.server.HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
listener.socket.close()
listener.socket = socket.socket(fileno=int(sys.argv[1]))
listener.serve_forever()
"""
"""Takes requests at once, where Prefect's server takes seconds."""


def servers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "prefect.server.api.server import create_app" in " ".join(child.cmdline())]


def process_at(server: TemporaryServer) -> int:
    return int(httpx.get(f"{server.api_url}/health", timeout=60).text)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemporaryServer]:
    monkeypatch.setattr(temporary, "_PROGRAM", ANSWERS)
    server = TemporaryServer({})
    server.wait_until_ready(60.0)
    yield server
    server.close()
    server.process.kill()
    server.process.wait()
    server.close()
    assert not server.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "at its end"])
def test_it_ends_with_its_process(tmp_path: Path, way: str) -> None:
    command, environment = [sys.executable, "-c", PROGRAM], {**os.environ, "PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        assert os.getpgid(server.pid) != os.getpgid(run.pid)
        if way == "at its end":
            run.communicate(timeout=60)
            assert run.returncode == 0
        else:
            run.kill()
    assert psutil.wait_procs([server], timeout=60)[1] == []


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "_PROGRAM", "raise SystemExit('the database is of a newer release')")
    with pytest.raises(RuntimeError, match=r"exit code 1\nthe database is of a newer release"):
        TemporaryServer({}).wait_until_ready(60.0)


@pytest.fixture
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a lost server changes for the rest of a process ends with the test."""
    monkeypatch.setattr(logging, "raiseExceptions", True)
    loggers = [logging.getLogger(name) for name in ("prefect._internal.concurrency", "prefect.events")]
    levels = [logger.level for logger in loggers]
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 7}):
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("own_settings")
def test_a_server_that_dies_is_started_again_and_requests_wait(running: TemporaryServer) -> None:
    heard = ProgressLog()
    first, watched = process_at(running), contextvars.copy_context()
    watched.run(listen, heard)
    watch = threading.Thread(target=watched.run, args=(running.keep_running, 60.0), daemon=True)
    watch.start()
    os.kill(first, signal.SIGKILL)
    # Asked while no server runs.
    second = process_at(running)
    assert second != first
    assert ["SIGKILL" in line for line in heard.lines] == [True]
    assert (running.lost, PREFECT_CLIENT_MAX_RETRIES.value()) == (None, 7)
    # Once more at once: it would die again and again.
    os.kill(second, signal.SIGKILL)
    watch.join(60)
    assert running.lost is not None
    assert PREFECT_CLIENT_MAX_RETRIES.value() == 1
    with pytest.raises(httpx.ConnectError):
        process_at(running)


@pytest.mark.usefixtures("own_settings")
def test_a_server_that_cannot_be_started_again_is_lost(running: TemporaryServer) -> None:
    running._command = ["/nowhere/python"]
    watch = threading.Thread(target=running.keep_running, args=(60.0,), daemon=True)
    watch.start()
    os.kill(process_at(running), signal.SIGKILL)
    watch.join(60)
    assert running.lost is not None


def test_a_run_does_not_go_on_without_its_server(monkeypatch: pytest.MonkeyPatch, running: TemporaryServer) -> None:
    monkeypatch.setattr(temporary, "_server", running)
    temporary.require_not_lost()
    running.lost = "it died"
    with pytest.raises(ServerLostError, match="it died"):
        temporary.require_not_lost()


def test_checks_do_not_take_it_for_a_configured_server(
    monkeypatch: pytest.MonkeyPatch, running: TemporaryServer
) -> None:
    with temporary_settings({PREFECT_API_URL: running.api_url}):
        assert server_url() == running.api_url
        monkeypatch.setattr(temporary, "_server", running)
        assert server_url() is None


@pytest.mark.slow
def test_a_run_whose_server_is_killed_ends_the_same_and_leaves_no_records(
    undisturbed: tuple[Runs, Start], tmp_path: Path
) -> None:
    runs, folder = Runs(tmp_path / "runs"), tmp_path / "run"
    temporary_folder = tmp_path / "temporary"
    temporary_folder.mkdir()
    environment = {"PREFECT_API_URL": "", "TMPDIR": str(temporary_folder)}
    with training_process(runs, folder, environment=environment) as run:
        while not runs.path("iteration_000001", "rollouts.manifest.json").exists():
            assert run.poll() is None, (folder / "err").read_text()
            time.sleep(0.05)
        (server,) = servers_of(run.pid)
        server.kill()
        assert run.wait(400) == 0, (folder / "err").read_text()
    assert printed_summary(folder)["policy_digest"] == undisturbed[1].summary.policy_digest
    assert runs.tables() == undisturbed[0].tables()
    assert [*(folder / "home").rglob("*.db*")] == []
    while [*temporary_folder.glob("grpo-server-*")]:
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "its group ended"])
def test_no_server_is_left_by_a_training(tmp_path: Path, way: str) -> None:
    command = [sys.executable, "-m", "flows.command_line.main", "train", "configs/tiny.yaml"]
    command += ["--set", f"storage.root={tmp_path}", "--set", "evaluate.prompts=null"]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("PREFECT_API_URL", None)
    log = tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    while not (tmp_path / "tiny" / "iteration_000001" / "rollouts.manifest.json").exists():
        assert run.poll() is None, log.read_text()
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    assert servers_of(run.pid)
    if way == "killed":
        run.send_signal(signal.SIGKILL)
    else:
        # The server is in none of its groups, and takes the run's last requests.
        os.killpg(run.pid, signal.SIGTERM)
    run.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
