"""Ctrl-C and SIGTERM in a real terminal: the running stage is finished, the same command resumes to the same policy."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tests.flows.conftest import TINY, Runs

CTRL_C = b"\x03"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECONDS = 300.0


class Terminal:
    """A running command, and everything that its terminal has shown."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self._shown = process, master, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # The terminal is gone once its last process has ended.
        with contextlib.suppress(OSError):
            while some := os.read(self._master, 1 << 16):
                self._shown += some

    @property
    def shown(self) -> str:
        """The text so far, with one space for each line break, since lines wrap at the terminal's width."""
        return " ".join(_ESCAPES.sub("", self._shown.decode(errors="replace")).split())

    def press(self, key: bytes) -> None:
        """Press a key; the terminal sends a signal for Ctrl-C."""
        os.write(self._master, key)

    def wait_for(self, text: str) -> None:
        """Wait until the terminal has shown a text."""
        until = time.monotonic() + _SECONDS
        while text not in self.shown:
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < until, self.shown
            time.sleep(0.01)

    def wait(self) -> int:
        """Wait for the end of the command: its exit code."""
        code = self.process.wait(_SECONDS)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Start `grpo COMMAND` in a terminal with Prefect's home in a folder, and kill it at the end of the context."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x28\x00\xf0\x00\x00\x00\x00\x00")
    own = {"PREFECT_HOME": str(folder), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    variables = {name: value for name, value in {**os.environ, **own, **environment}.items() if value}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.command_line.main", *command],
        env=variables,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


STOPPING = "stopping after this stage ("
MORE: dict[str, object] = {"rollout__num_inference_steps": 6, "rollout__group_size": 4}
"""Stages that last long enough to be seen in a terminal."""


@contextlib.contextmanager
def training(runs: Runs, folder: Path, server: str, *options: str, **changes: object) -> Iterator[Terminal]:
    command = ["train", str(TINY), *options, *runs.sets("run", **changes)]
    with terminal(command, folder, {"PREFECT_API_URL": server}) as started:
        yield started


def resumed(runs: Runs, stopped: Terminal) -> str:
    """Run the command that the terminal shows: the digest of the policy that it ends with."""
    command = shlex.split(stopped.shown.rpartition("the same command resumes it: ")[2])
    assert command[1:4] == ["-m", "flows.command_line.main", "train"]
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout.splitlines()[-1])["policy_digest"])


@pytest.fixture(scope="module")
def golden(server: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of an undisturbed run with a staleness."""
    known: dict[int, str] = {}

    def digest(staleness: int) -> str:
        if staleness not in known:
            runs = Runs(tmp_path_factory.mktemp("golden"))
            known[staleness] = str(runs.start(run__staleness=staleness, **MORE).summary.policy_digest)
        return known[staleness]

    return digest


MOMENTS = (
    "loading libraries",
    "iteration 1: collect rollouts",
    "iteration 1: score",
    "iteration 1: update policy",
    "iteration 2/2",
)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("kind", "staleness"), [("temporary", 0), ("lasting", 0), ("temporary", 1)])
def test_at_every_moment(
    empty: Runs, golden: Callable[[int], str], tmp_path: Path, moment: str, kind: str, staleness: int
) -> None:
    server = str(PREFECT_API_URL.value()) if kind == "lasting" else ""
    if server and moment == MOMENTS[0]:
        moment = "reading"
    with training(empty, tmp_path / "home", server, run__staleness=staleness, **MORE) as run:
        run.wait_for(moment)
        run.press(CTRL_C)
        code = run.wait()
    # While the last report is written there is no stage to stop before.
    assert code == 1 or moment == MOMENTS[-1]
    if moment == MOMENTS[1]:
        assert moment in run.shown.partition(STOPPING)[2].partition(")")[0]
    assert "Traceback" not in run.shown
    digest = resumed(empty, run) if code else empty.policy_digest(2)
    assert digest == golden(staleness)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("key", [signal.SIGINT, signal.SIGTERM])
def test_sigterm_and_a_second_signal(
    empty: Runs, golden: Callable[[int], str], tmp_path: Path, key: signal.Signals, second: bool, staleness: int
) -> None:
    with training(empty, tmp_path / "home", "", run__staleness=staleness, **MORE) as run:
        run.wait_for("iteration 1: collect rollouts")
        os.kill(run.process.pid, key)
        run.wait_for(STOPPING)
        if second:
            os.kill(run.process.pid, key)
        assert run.wait() == (1 if key == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in run.shown
    stage_is_there = empty.path("iteration_000001", "rollouts.manifest.json").exists()
    assert stage_is_there or second
    assert resumed(empty, run) == golden(staleness)
