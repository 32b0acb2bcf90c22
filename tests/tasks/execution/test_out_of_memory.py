"""Out of memory: once in halves, said so, and the same result; after that a person has to decide."""

import contextvars
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch

from configs.placement_sections import PlacementSection
from grpo_core.errors import InputError
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.records import TokenBatch
from tasks.execution.out_of_memory import halved_once
from tasks.models.resident import release_policy
from tasks.progress import listen
from tasks.rollouts.collect import collect_rollouts_task
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.update.policy import update_policy_task
from tests.tasks.execution.test_shards import rollout_arguments
from tests.tasks.update_jobs import IMAGES, UPDATE, advantages_of, job_of, weights_and_moments

HERE = PlacementSection(device="cpu")


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def advance(self, stage: str, done: int, total: int) -> None:
        """Not of interest."""

    def log(self, line: str) -> None:
        self.said.append(line)


def runs_out_above(size: int) -> Callable[[int], str]:
    def run(requested: int) -> str:
        if requested > size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return f"done with {requested}"

    return run


def test_once_and_said_so() -> None:
    lines = Lines()

    def body() -> None:
        listen(lines)
        assert (
            halved_once("iteration 3: update policy", "update.micro_batch_size", 9, runs_out_above(4)) == "done with 4"
        )
        assert (
            halved_once("iteration 4: update policy", "update.micro_batch_size", 4, runs_out_above(4)) == "done with 4"
        )

    contextvars.copy_context().run(body)
    assert lines.said == [
        "iteration 3: update policy: CUDA out of memory; done again with update.micro_batch_size 4 in the place of 9"
    ]


@pytest.mark.parametrize("size", [1, 9])
def test_not_twice(size: int) -> None:
    with pytest.raises(InputError, match=f"update.micro_batch_size: got {max(1, size // 2)}. The device's memory"):
        halved_once("update", "update.micro_batch_size", size, runs_out_above(0))


def test_other_errors_pass() -> None:
    def run(size: int) -> str:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        halved_once("update", "update.micro_batch_size", 8, run)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path / "runs"), "run")
    use_store(store)
    return store


def test_rollouts_in_halves_are_the_same_samples(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect_rollouts_task.fn(**rollout_arguments("whole", HERE))
    sample = GlmImagePolicy.sample

    def bounded(self: GlmImagePolicy, prompts: list[str], **others: object) -> object:
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return sample(self, prompts, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(GlmImagePolicy, "sample", bounded)
    halved = collect_rollouts_task.fn(**rollout_arguments("halved", HERE))
    ours, theirs = (pl.read_parquet(store.local_files(each) / "*.parquet") for each in (halved, whole))
    exact = ["sample_id", "seed", "token_ids", "finished", "policy_digest", "noise_seed"]
    assert ours.select(exact).equals(theirs.select(exact))
    difference = ours["rollout_logprobs"].explode() - theirs["rollout_logprobs"].explode()
    assert difference.abs().max() < 1e-5
    assert not [path for path in Path(store.path(".incoming")).iterdir() if path.is_dir()]


def test_an_update_in_halves_makes_the_same_weights(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = IMAGES.collect()
    job = job_of(IMAGES, rollouts, advantages_of(rollouts), update=UPDATE.model_copy(update={"micro_batch_size": 2}))
    arguments = (job.policy, job.rollouts, job.advantages, job.model, job.update, job.seed, job.max_staleness)
    logprobs, stopped = GlmImagePolicy.logprobs, []

    def bounded(self: GlmImagePolicy, tokens: TokenBatch, *, entropy: bool = True) -> object:
        # After some steps: the weights are half way between two versions by then.
        stopped.append(len(tokens))
        if len(tokens) > 1 and torch.is_grad_enabled() and len(stopped) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return logprobs(self, tokens, entropy=entropy)

    monkeypatch.setattr(GlmImagePolicy, "logprobs", bounded)
    halved = update_policy_task.fn(*arguments, "iteration 1", HERE)
    assert max(stopped[-4:]) == 1
    monkeypatch.undo()
    release_policy()
    other = ArtifactStore(store.root, "other")
    use_store(other)
    again = IMAGES.collect()
    whole = update_policy_task.fn(*(job.policy, (again,), advantages_of(again), *arguments[3:]), "iteration 1", HERE)
    assert halved.checkpoint is not None
    assert whole.checkpoint is not None
    ours = weights_and_moments(store.local_files(halved.checkpoint))
    theirs = weights_and_moments(other.local_files(whole.checkpoint))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-6
