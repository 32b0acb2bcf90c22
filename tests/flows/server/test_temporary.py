"""The server of a single run does not outlive it, however the run ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.server import temporary
from flows.server.reachable import server_url
from flows.server.temporary import TemporaryServer, not_waiting_for_ended_server

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


@pytest.fixture
def ended() -> Iterator[TemporaryServer]:
    """A server that has ended on its own."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as process, tempfile.TemporaryFile() as log:
        process.wait()
        yield TemporaryServer(process, 1, log)


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
        temporary._start(dict(os.environ)).wait_until_ready(60.0)


@pytest.mark.parametrize(("has_ended", "retries"), [(True, 1), (False, 7)])
def test_a_server_that_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, ended: TemporaryServer, has_ended: bool, retries: int
) -> None:
    monkeypatch.setattr(temporary, "_server", ended if has_ended else None)
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 7}):
        with pytest.raises(OSError, match="lost"), not_waiting_for_ended_server():
            raise OSError("lost")
        assert PREFECT_CLIENT_MAX_RETRIES.value() == retries


def test_checks_do_not_take_it_for_a_configured_server(monkeypatch: pytest.MonkeyPatch, ended: TemporaryServer) -> None:
    with temporary_settings({PREFECT_API_URL: ended.api_url}):
        assert server_url() == ended.api_url
        monkeypatch.setattr(temporary, "_server", ended)
        assert server_url() is None


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
    assert [child for child in children if "prefect.server.api.server import create_app" in " ".join(child.cmdline())]
    if way == "killed":
        run.send_signal(signal.SIGKILL)
    else:
        # The server is in none of its groups, and takes the run's last requests.
        os.killpg(run.pid, signal.SIGTERM)
    run.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
