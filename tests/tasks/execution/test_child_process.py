"""A child that does stages: warm from one to the next, and gone when it is killed, late, or not listened to."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.placement_sections import PlacementSection
from tasks.execution.call import StageCall, call_of
from tasks.execution.child_process import StageProcess
from tasks.execution.faults import LostStageError, StageTimeoutError
from tasks.execution.stages import stage_named
from tasks.rollouts.collect import collect_rollouts_task
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.execution.test_shards import rollout_arguments

HERE = PlacementSection(device="cpu")


class Heard:
    """Notes lines, and does something at the first sign of progress."""

    def __init__(self, then: object = None) -> None:
        self.lines: list[str] = []
        self.then = then

    def advance(self, stage: str, done: int, total: int) -> None:
        if callable(self.then):
            then, self.then = self.then, None
            then()

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def process() -> Iterator[StageProcess]:
    process = StageProcess()
    yield process
    process.end()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "runs"), "run")


def requested(store: ArtifactStore, folder: str) -> StageCall:
    return call_of(stage_named("collect rollouts"), rollout_arguments(folder, HERE), store)


def half_written(store: ArtifactStore) -> list[Path]:
    store.clear_abandoned()
    return [path for path in Path(store.path(".incoming")).iterdir() if path.is_dir()]


def child_of(process: StageProcess) -> psutil.Process:
    assert process._child is not None
    return psutil.Process(process._child.pid)


@pytest.mark.slow
def test_the_same_artifact_and_one_load_for_several_stages(process: StageProcess, store: ArtifactStore) -> None:
    heard = Heard()
    first = process.carry_out(requested(store, "one"), 300.0, heard).reference()
    child = child_of(process)
    second = process.carry_out(requested(store, "two"), None, heard).reference()
    assert child_of(process) == child
    assert [line.startswith("loaded ") for line in heard.lines] == [True]
    use_store(store)
    here = collect_rollouts_task.fn(**rollout_arguments("three", HERE))
    assert isinstance(first, ArtifactRef)
    assert isinstance(second, ArtifactRef)
    assert first.digest == second.digest == here.digest
    assert store.find("one/rollouts") == first


@pytest.mark.slow
def test_a_killed_child_is_told_and_replaced(process: StageProcess, store: ArtifactStore) -> None:
    process.carry_out(requested(store, "before"), None, Heard())
    child = child_of(process)
    with pytest.raises(LostStageError, match="ended by SIGKILL; the machine's memory may have run out"):
        process.carry_out(requested(store, "one"), None, Heard(child.kill))
    assert store.find("one/rollouts") is None
    assert half_written(store) == []
    assert process.carry_out(requested(store, "one"), None, Heard()).error is None
    assert store.find("one/rollouts") is not None


@pytest.mark.slow
def test_a_stage_over_its_time_is_ended_for_real(process: StageProcess, store: ArtifactStore) -> None:
    process.carry_out(requested(store, "before"), None, Heard())
    child = child_of(process)
    # Not even a signal that asks would reach it.
    stop = Heard(lambda: os.kill(child.pid, signal.SIGSTOP))
    begun = time.monotonic()
    with pytest.raises(StageTimeoutError, match="collect rollouts was ended: not done after 2 s"):
        process.carry_out(requested(store, "late"), 2.0, stop)
    assert time.monotonic() - begun < 10
    assert not child.is_running()
    assert half_written(store) == []
    assert store.find("late/rollouts") is None


@pytest.mark.slow
def test_whoever_is_interrupted_takes_no_outcome_for_the_next_stage(
    process: StageProcess, store: ArtifactStore
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.carry_out(requested(store, "one"), None, Heard(interrupt))
    outcome = process.carry_out(requested(store, "two"), None, Heard())
    assert outcome.artifact is not None
    assert outcome.artifact.folder == "two/rollouts"


@pytest.mark.slow
def test_a_child_ends_with_its_parent(store: ArtifactStore) -> None:
    process = StageProcess()
    ended = threading.Event()

    def leave() -> None:
        child = process._child
        assert child is not None
        assert child.stdin is not None
        # As the kernel does for a parent that was killed.
        child.stdin.close()
        child.wait(30)
        ended.set()

    with pytest.raises(LostStageError, match="ended by SIGKILL"):
        process.carry_out(requested(store, "one"), None, Heard(leave))
    assert ended.is_set()
    process.end()


@pytest.mark.slow
def test_two_who_ask_at_once_each_get_their_own(process: StageProcess, store: ArtifactStore) -> None:
    found: dict[str, str] = {}

    def ask(folder: str) -> None:
        outcome = process.carry_out(requested(store, folder), None, Heard())
        assert outcome.artifact is not None
        found[folder] = outcome.artifact.folder

    threads = [threading.Thread(target=ask, args=(folder,)) for folder in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {folder: f"{folder}/rollouts" for folder in ("one", "two", "three")}
