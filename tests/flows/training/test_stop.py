"""Ctrl-C and SIGTERM in a real terminal: the running stage is finished, the same command resumes to the same policy."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tests.flows.conftest import TINY, Runs
from tests.flows.training.terminal import CTRL_C, Terminal, terminal

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
