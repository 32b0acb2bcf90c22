"""The server of a single run does not outlive it, however the run ends."""

import contextlib
import contextvars
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.server import temporary
from flows.server.reachable import server_url
from flows.server.temporary import ServerLostError, TemporaryServer, database_settings, keep_template
from tasks.progress import listen
from tests.flows.conftest import Runs, Start, printed_summary, training_process
from tests.processes import ProgressLog

PROGRAM = """
import sys
from flows.server.prefect_settings import apply_settings
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


def heard_while_watched(server: TemporaryServer, happen: Callable[[], object]) -> list[str]:
    """What is logged until nobody watches the server any more, after something has happened to it."""
    heard, watched = ProgressLog(), contextvars.copy_context()
    watched.run(listen, heard)
    watch = threading.Thread(target=watched.run, args=(server.watch,), daemon=True)
    watch.start()
    happen()
    watch.join(60)
    assert not watch.is_alive()
    return heard.lines


@pytest.mark.usefixtures("own_settings")
def test_a_server_that_dies_is_reported_at_once_and_no_request_waits(running: TemporaryServer) -> None:
    (line,) = heard_while_watched(running, lambda: os.kill(process_at(running), signal.SIGKILL))
    assert "SIGKILL" in line
    assert running.lost is not None
    assert PREFECT_CLIENT_MAX_RETRIES.value() == 1
    with pytest.raises(httpx.ConnectError):
        process_at(running)


@pytest.mark.usefixtures("own_settings")
def test_a_full_disk_is_reported_at_once_with_its_free_space(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "_PROGRAM", ANSWERS)
    monkeypatch.setattr(tempfile, "tempdir", str(tiny_disk))
    server = TemporaryServer({})
    server.wait_until_ready(60.0)

    def fill() -> None:
        with contextlib.suppress(OSError), (tiny_disk / "full").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    (line,) = heard_while_watched(server, fill)
    assert re.search(rf"{tiny_disk} \(0\.\d MiB free\): No space left on device", line)
    assert server.lost is not None
    server.process.kill()
    server.process.wait()
    server.close()


@pytest.mark.usefixtures("own_settings")
def test_a_server_that_is_closed_is_not_lost(running: TemporaryServer) -> None:
    assert heard_while_watched(running, running.close) == []
    assert running.lost is None


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
@pytest.mark.parametrize("way", ["killed", "full"])
def test_a_run_whose_server_is_lost_ends_and_is_resumed(
    undisturbed: tuple[Runs, Start], tmp_path: Path, small_disk: Path, way: str
) -> None:
    """By one sentence with the cause, and the command that resumes it; the disk is that of temporary files."""
    runs, folder, filling = Runs(tmp_path / "runs"), tmp_path / "run", small_disk / "full"
    environment = {"PREFECT_API_URL": "", "TMPDIR": str(small_disk)}
    with training_process(runs, folder, environment=environment) as run:
        while not runs.path("iteration_000001", "rollouts.manifest.json").exists():
            assert run.poll() is None, (folder / "err").read_text()
            time.sleep(0.05)
        if way == "killed":
            (server,) = servers_of(run.pid)
            server.kill()
        else:
            with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        assert run.wait(120) == 1, (folder / "err").read_text()
    said = (folder / "err").read_text()
    cause = "SIGKILL" if way == "killed" else f"{small_disk} (0.0 MiB free)"
    assert cause in said
    assert "the same command resumes it" in said
    assert "Traceback" not in said
    filling.unlink(missing_ok=True)
    with training_process(runs, tmp_path / "again", environment=environment) as run:
        assert run.wait(400) == 0, (tmp_path / "again" / "err").read_text()
    assert printed_summary(tmp_path / "again")["policy_digest"] == undisturbed[1].summary.policy_digest
    assert runs.tables() == undisturbed[0].tables()
    while [*small_disk.glob("grpo-*/*/*")]:
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


MIGRATES = "PREFECT_SERVER_DATABASE_MIGRATE_ON_START"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grpo"


def server_folder(path: Path, rows: int = 0) -> Path:
    """A folder as of a server that runs, which has not moved its last pages into the database."""
    path.mkdir()
    database_settings(path)
    if rows:
        connection = sqlite3.connect(path / "prefect.db")
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE block (name TEXT)")
        connection.executemany("INSERT INTO block VALUES (?)", [(str(row),) for row in range(rows)])
        connection.commit()
        keep_template(path)
        connection.close()
    return path


def rows_of(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "prefect.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM block").fetchone()[0])


def test_the_next_server_has_what_the_first_one_made_and_does_not_migrate(tmp_path: Path, cache: Path) -> None:
    server_folder(tmp_path / "first", rows=3)
    second = tmp_path / "second"
    second.mkdir()
    assert database_settings(second)[MIGRATES] == "false"
    assert rows_of(second) == 3
    assert [*cache.glob(".*")] == []
    # What this server adds is its own.
    with closing(sqlite3.connect(second / "prefect.db")) as connection:
        connection.execute("INSERT INTO block VALUES ('a run')")
        connection.commit()
    keep_template(second)
    assert rows_of(server_folder(tmp_path / "third")) == 3


@pytest.mark.parametrize("change", ["damaged", "truncated", "another release"])
def test_another_template_is_not_used_and_replaced(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    server_folder(tmp_path / "first", rows=3)
    (kept,) = cache.glob("*.db")
    content = bytearray(kept.read_bytes())
    if change == "damaged":
        content[100] ^= 1
    if change == "another release":
        monkeypatch.setattr(temporary, "_prefix", lambda: "prefect-9.9.9-")
    kept.write_bytes(content[:-1] if change == "truncated" else content)
    second = tmp_path / "second"
    second.mkdir()
    assert MIGRATES not in database_settings(second)
    assert not (second / "prefect.db").exists()
    server_folder(tmp_path / "third", rows=5)
    assert rows_of(server_folder(tmp_path / "fourth")) == 5
    assert len([*cache.glob("*.db")]) == 1


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    assert rows_of(server_folder(tmp_path / "first", rows=1)) == 1
    assert cache.read_text() == "a file"
