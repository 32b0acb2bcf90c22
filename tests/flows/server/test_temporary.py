"""The server of a single run does not outlive it, however the run ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.server import temporary
from tests.flows.conftest import REPOSITORY

# With another program in the place of the server, which takes many seconds to start.
PROGRAM = """
import sys
from flows.prefect_settings import apply_settings
apply_settings()
import subprocess
from prefect.server.api.server import SubprocessASGIServer
from flows.server.temporary import ending_with_temporary_server

with ending_with_temporary_server():
    SubprocessASGIServer().server_process = subprocess.Popen(["sleep", "600"])
with ending_with_temporary_server(), ending_with_temporary_server():
    print(SubprocessASGIServer().server_process.pid, flush=True)
    sys.stdin.read()
SubprocessASGIServer().stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "at its end"])
def test_it_ends_with_its_run(way: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        children = psutil.Process(run.pid).children()
        assert len(children) == 2
        assert server in children
        if way == "at its end":
            run.communicate(timeout=60)
            assert run.returncode == 0
        else:
            (watcher,) = [child for child in children if child != server]
            assert os.getpgid(watcher.pid) != os.getpgid(run.pid)
            run.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert len(gone) == 2


@pytest.mark.parametrize(
    ("error", "ended", "retries"), [(KeyboardInterrupt, False, 1), (OSError, True, 1), (OSError, False, 7)]
)
def test_a_server_that_may_have_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], ended: bool, retries: int
) -> None:
    with subprocess.Popen(["true" if ended else "cat"], stdin=subprocess.PIPE) as server:
        if ended:
            server.wait()
        monkeypatch.setattr(SubprocessASGIServer(), "server_process", server)
        monkeypatch.setattr(temporary, "_watch", lambda pid: None)
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 7}):
            with pytest.raises(error), temporary.ending_with_temporary_server():
                raise error
            assert PREFECT_CLIENT_MAX_RETRIES.value() == retries


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "its group ended"])
def test_no_server_is_left_by_a_training(tmp_path: Path, way: str) -> None:
    command = [sys.executable, "-m", "flows.command_line.main", "train", "configs/tiny.yaml"]
    command += ["--set", f"storage.root={tmp_path}", "--set", "evaluate.prompts=null"]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("PREFECT_API_URL", None)
    log = tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    while not (tmp_path / "tiny" / "iteration_000001" / "rollouts.manifest.json").exists():
        assert run.poll() is None, log.read_text()
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    assert [child for child in children if "prefect.server.api.server:create_app" in child.cmdline()]
    if way == "killed":
        run.send_signal(signal.SIGKILL)
    else:
        # The server ends at once, and may not take the run's last requests.
        os.killpg(run.pid, signal.SIGTERM)
    run.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
