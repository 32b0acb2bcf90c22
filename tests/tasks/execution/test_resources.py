"""Out of memory: half the batch, remembered for the run, and the same result."""

import contextvars
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from configs.placement import PlacementSection
from grpo_core.errors import InputError
from grpo_core.policies.glm_image.policy import GlmImagePolicy, GlmImageTokens
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from tasks.execution.resources import halve_on_out_of_memory, resource, run_resources
from tasks.models.resident import ResidentPolicy
from tasks.progress import listen
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.update.update_policy import update_policy_task
from tests.processes import ProgressLog
from tests.tasks.execution.test_dispatch import rollout_arguments
from tests.tasks.update.update_jobs import IMAGES, UPDATE, advantages_of, job_of, largest_difference

LOCAL_PLACEMENT = PlacementSection(devices="cpu")


def runs_out_above(size: int) -> Callable[[int], str]:
    def run(requested: int) -> str:
        if requested > size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return f"done with {requested}"

    return run


@pytest.fixture(autouse=True)
def resources() -> Iterator[None]:
    with run_resources():
        yield


SETTING = "update.micro_batch_size"


def test_the_half_is_remembered_for_the_run_and_the_setting() -> None:
    log = ProgressLog()
    listen(log)
    requested: list[int] = []

    def call(size: int) -> str:
        requested.append(size)
        return runs_out_above(4)(size)

    for run, setting in (("a", SETTING), ("a", SETTING), ("b", SETTING), ("a", "rollout.prompts_per_batch")):
        assert halve_on_out_of_memory("a stage", run, setting, 9, call) == "done with 4"
    assert requested == [9, 4, 4, 9, 4, 9, 4]
    assert len(log.lines) == 3
    assert f"with {SETTING} 4 instead of 9" in log.lines[0]
    # A remembered half that is too large is halved again.
    assert halve_on_out_of_memory("a stage", "a", SETTING, 9, runs_out_above(2)) == "done with 2"


@pytest.mark.parametrize("size", [1, 9])
def test_one_stage_is_halved_once_and_for_no_other_error(size: int) -> None:
    with pytest.raises(InputError) as caught:
        halve_on_out_of_memory("iteration 3: update", "run", SETTING, size, runs_out_above(0))
    assert (caught.value.place, caught.value.value) == (SETTING, max(1, size // 2))
    assert "for iteration 3: update (CUDA out of memory)" in caught.value.hint
    assert "gradient_checkpointing" in caught.value.hint

    def call(size: int) -> str:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        halve_on_out_of_memory("update", "run", SETTING, 8, call)


def test_rollouts_in_halves_are_the_same_samples(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect_rollouts_task.fn(**rollout_arguments("whole", LOCAL_PLACEMENT))
    sample = GlmImagePolicy.sample

    def bounded(self: GlmImagePolicy, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        if len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return sample(self, requests)

    monkeypatch.setattr(GlmImagePolicy, "sample", bounded)
    halved = collect_rollouts_task.fn(**rollout_arguments("halved", LOCAL_PLACEMENT))
    ours, theirs = (pl.read_parquet(store.local_files(each) / "part-*.parquet") for each in (halved, whole))
    exact = ["sample_id", "seed", "token_ids", "finished", "policy_digest", "noise_seed"]
    assert ours.select(exact).equals(theirs.select(exact))
    difference = ours["rollout_logprobs"].explode() - theirs["rollout_logprobs"].explode()
    assert difference.abs().max() < 1e-5
    assert not [path for path in Path(store.path(".incoming")).iterdir() if path.is_dir()]


def test_an_update_in_halves_makes_the_same_weights(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = IMAGES.collect()
    job = job_of(IMAGES, rollouts, advantages_of(rollouts), update=UPDATE.model_copy(update={"micro_batch_size": 2}))
    arguments = (job.policy, job.rollouts, job.advantages, job.model, job.updates, job.seed, job.max_staleness)
    logprobs, stopped = GlmImageTokens.logprobs, []
    shutil.copytree(store.path(""), Path(store.root) / "whole")

    def bounded(self: GlmImageTokens, tokens: TokenBatch, **options: Any) -> object:
        # After some steps: the weights are half way between two versions by then.
        stopped.append(len(tokens))
        if len(tokens) > 1 and torch.is_grad_enabled() and len(stopped) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return logprobs(self, tokens, **options)

    monkeypatch.setattr(GlmImageTokens, "logprobs", bounded)
    halved = update_policy_task.fn(*arguments, "iteration 1", LOCAL_PLACEMENT)
    assert max(stopped[-4:]) == 1
    monkeypatch.undo()
    resource(ResidentPolicy).close()
    other = ArtifactStore(store.root, "whole")
    use_store(other)
    whole = update_policy_task.fn(*arguments, "iteration 1", LOCAL_PLACEMENT)
    assert largest_difference(store.local_files(halved.checkpoint), other.local_files(whole.checkpoint)) < 1e-6


class Kept:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_one_object_per_run_closed_with_it_and_shared_by_its_threads() -> None:
    with run_resources():
        first = resource(Kept)
        assert resource(Kept) is first
        with run_resources():
            inner = resource(Kept)
            assert inner is not first
        assert (inner.closed, first.closed) == (True, False)
        assert resource(Kept) is first
    assert first.closed
    found: list[Kept] = []
    with run_resources():
        for _ in range(4):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(lambda: found.append(resource(Kept)),))
            thread.start()
            thread.join()
        assert found == [resource(Kept)] * 4


def test_one_that_cannot_be_closed_leaves_no_other_open() -> None:
    closed: list[str] = []

    class Failing:
        def close(self) -> None:
            closed.append("failing")
            raise OSError("the bucket is gone")

    class Sound:
        def close(self) -> None:
            closed.append("sound")

    def body() -> None:
        with run_resources():
            assert isinstance(resource(Failing), Failing)
            assert isinstance(resource(Sound), Sound)

    with pytest.raises(OSError, match="the bucket is gone"):
        contextvars.copy_context().run(body)
    # In the order in which they were made.
    assert closed == ["failing", "sound"]
