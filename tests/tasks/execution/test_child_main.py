"""The child itself: what stages print is no answer, calls are UTF-8, and nothing half is left when it is killed."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import psutil
import pytest

from configs.placement_sections import PlacementSection
from configs.reward_sections import RewardSection
from tasks.execution.call import StageCall, call_of
from tasks.execution.child_process import StageProcess
from tasks.execution.faults import LostStageError, StageTimeoutError
from tasks.execution.stages import stage_named
from tasks.runs.layout import SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.execution.test_child_process import Heard, child_of, half_written, requested
from tests.tasks.update_jobs import IMAGES

pytestmark = pytest.mark.slow
LOUD = Path(__file__).parent / "loud.py"


@pytest.fixture(scope="module")
def process() -> Iterator[StageProcess]:
    with pytest.MonkeyPatch.context() as patch:
        # As on a machine whose locale knows no letters but those of English.
        patch.setenv("PYTHONIOENCODING", "ascii")
        patch.setenv("PYTHONUTF8", "0")
        process = StageProcess()
        yield process
        process.end()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path / "runs"), "run")
    use_store(store)
    return store


def scoring(store: ArtifactStore, function: str) -> StageCall:
    arguments = {
        "rollouts": IMAGES.collect(),
        "section": RewardSection(reward="function", settings={"function": f"{LOUD}:{function}"}),
        "folder": "iteration_000001/rewards",
        "title": "第一",
        "placement": PlacementSection(device="cpu"),
        "earlier": (),
        "part": None,
    }
    return call_of(stage_named("score reward"), arguments, store)


def test_what_a_reward_prints_is_no_answer_and_letters_are_those_that_were_sent(
    process: StageProcess, store: ArtifactStore
) -> None:
    told: set[str] = set()

    class Noting(Heard):
        def advance(self, stage: str, done: int, total: int) -> None:
            told.add(stage)

    made = process.carry_out(scoring(store, "prints_everywhere"), 600.0, Noting()).reference()
    assert told == {"第一: score function"}
    assert isinstance(made, ArtifactRef)
    values = pl.read_parquet(store.local_files(made) / SCORES_FILE)["value"]
    assert values.to_list() == [len(prompt) for prompt in IMAGES.prompts for _ in range(4)]


def test_a_time_out_in_the_middle_of_the_commit_leaves_nothing_half(
    process: StageProcess, store: ArtifactStore
) -> None:
    process.carry_out(requested(store, "before"), None, Heard())
    with store.alone(), pytest.raises(StageTimeoutError):
        # The child has its files staged, and waits for the lock under which they become an artifact.
        process.carry_out(requested(store, "late"), 20.0, Heard())
    assert half_written(store) == []
    assert store.find("late/rollouts") is None
    assert process.carry_out(requested(store, "late"), None, Heard()).error is None
    assert store.find("late/rollouts") is not None
    assert not Path(store.path("set_aside")).exists()


def test_what_a_stage_has_started_ends_with_the_parent(store: ArtifactStore) -> None:
    process = StageProcess()
    process.carry_out(requested(store, "before"), None, Heard())
    child, started = child_of(process), list[psutil.Process]()

    def leave() -> None:
        limit = time.monotonic() + 300
        while not started and time.monotonic() < limit:
            started.extend(each for each in child.children(recursive=True) if each.name() == "sleep")
            time.sleep(0.05)
        assert process._child is not None
        assert process._child.stdin is not None
        # As the kernel does for a parent that was killed.
        process._child.stdin.close()

    watching = threading.Thread(target=leave)
    watching.start()
    with pytest.raises(LostStageError, match="ended by SIGKILL"):
        process.carry_out(scoring(store, "starts_a_server"), None, Heard())
    watching.join()
    process.end()
    assert started
    assert not psutil.wait_procs(started, 10)[1]
