"""A run has one writer: a second one is refused, and the first ends as if it were alone."""

import asyncio
import contextvars
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.training import train as training
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import LockLostError, locked
from tests.flows.conftest import TINY, Compare, Runs, printed_summary, refused, training_process
from tests.flows.rescoring.test_rescore import JPEG, SSIM, scored_again


@contextmanager
def held(runs: Runs, place: str = "") -> Iterator[None]:
    with locked(ArtifactStore(str(runs.root), "run"), place, setting="run.name", value="run"):
        yield


def test_a_second_training_is_refused_before_anything_is_touched(finished: Runs) -> None:
    other = ["--set", "update.learning_rate=0.1"]
    with held(finished):
        before = finished.tables()
        result = CliRunner().invoke(application, ["train", str(TINY), *finished.sets(), *other])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: run.name: got 'run'.")
        assert f"process {os.getpid()}" in result.stderr
        assert finished.tables() == before
        assert finished.reasons() == []
    assert finished.start().stages == ()


def test_rescorings_are_held_by_name(finished: Runs) -> None:
    with held(finished), held(finished, "rescored/other"):
        (error,) = refused(lambda: scored_again(finished, SSIM))
        assert (error.place, error.value) == ("--name", "other")
        assert not finished.path("rescored", "other", "rewards.yaml").exists()
        summary, _ = scored_again(finished, JPEG, name="another")
    assert summary.samples == 8


class Remover:
    """Removes the lock after the first iteration, as a person who deletes the folder would."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def advance(self, stage: str, done: int, total: int) -> None:
        pass

    def log(self, line: str) -> None:
        if line.startswith("iteration 1/"):
            self.lock.unlink()


@pytest.mark.slow
def test_training_that_lost_its_run_stops_at_the_next_stage(empty: Runs, final: Compare) -> None:
    config = read_config(TINY, empty.overrides(run__name="run"))

    def body() -> None:
        listen(Remover(empty.path(".lock")))
        asyncio.run(training.train(config))

    with pytest.raises(LockLostError, match="moved or removed"):
        contextvars.copy_context().run(body)
    assert not empty.path("iteration_000002").exists()
    again = empty.start()
    assert again.stages[0] == "iteration 2: collect rollouts"
    final(empty, again)


@pytest.mark.slow
def test_a_living_training_is_left_alone_and_may_be_rescored(empty: Runs, final: Compare, tmp_path: Path) -> None:
    with training_process(empty, tmp_path) as child:
        while not empty.path("iteration_000002", "advantages.manifest.json").exists():
            assert child.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.01)
        # In the update; at the end of the stage before it held the lock of commits.
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGSTOP)
        (error,) = refused(empty.start)
        assert (error.place, error.value) == ("run.name", "run")
        assert f"process {child.pid}" in error.hint
        assert scored_again(empty, JPEG, iterations="1")[0].samples == 4
        assert not empty.path("policies", "000002.manifest.json").exists()
        os.kill(child.pid, signal.SIGCONT)
        while child.poll() is None:
            scored_again(empty, JPEG, name=f"beside-{len(list(empty.path('rescored').iterdir()))}", iterations="1")
        assert child.returncode == 0, (tmp_path / "err").read_text()
    again = empty.start()
    assert again.stages == ()
    assert printed_summary(tmp_path)["policy_digest"] == again.summary.policy_digest
    assert scored_again(empty, JPEG, name="after")[0].samples == 8
    shutil.rmtree(empty.path("rescored"))
    final(empty, again)
