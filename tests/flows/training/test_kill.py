"""kill -9 of the command with a server of its own: started again, it ends with the same policy and tables.

The chaos tests kill in every stage, at every step of it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.conftest import REPOSITORY, TINY, Runs, Start

# The command line itself, with a listener in the place of the progress bars.
PROGRAM = """
import os, signal, sys
from contextlib import contextmanager
from flows.prefect_settings import apply_settings
apply_settings()
import flows.terminal.progress
from tasks.progress import listen

wanted = sys.argv.pop(1)

class Deadly:
    def advance(self, stage, done, total):
        if stage == wanted and done:
            os.kill(os.getpid(), signal.SIGKILL)

    def log(self, line):
        pass

@contextmanager
def deadly_progress():
    listen(Deadly())
    yield

flows.terminal.progress.training_progress = deadly_progress
from flows.command_line.main import main
main()
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def grpo_train(runs: Runs, *, kill_in: str, home: Path) -> Ended:
    arguments = [part for override in runs.overrides(run__name="run") for part in ("--set", override)]
    environment = {**os.environ, "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, kill_in, "train", str(TINY), *arguments, "--json"]
    home.mkdir(exist_ok=True)
    out, err = home / "stdout", home / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        # The temporary server outlives a killed parent: files instead of pipes, and the whole group is ended.
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return Ended(child.returncode, out.read_text(), err.read_text())


def left_behind(runs: Runs) -> list[Path]:
    return [path for path in runs.path(".incoming").iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["score psnr", "update policy"])
def test_command_killed_in_a_stage_and_started_again(
    empty: Runs, undisturbed: tuple[Runs, Start], tmp_path: Path, stage: str
) -> None:
    child = grpo_train(empty, kill_in=f"iteration 2: {stage}", home=tmp_path / "home")
    assert child.returncode == -signal.SIGKILL, child.stderr
    # Beside a reward that is scored, another may be.
    assert len(left_behind(empty)) in ((1, 2) if stage.startswith("score ") else (1,))
    again = grpo_train(empty, kill_in="", home=tmp_path / "home")
    assert again.returncode == 0, again.stderr
    assert left_behind(empty) == []
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["policy_digest"] == undisturbed[1].summary.policy_digest
    assert empty.tables() == undisturbed[0].tables()
