"""The optimizer stays in memory between the updates of a process, and is read from the files by any other."""

from pathlib import Path

import pytest

from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from tasks.execution.resources import run_resources
from tasks.runs.layout import OPTIMIZER_FILE
from tasks.storage.artifacts.reference import PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.job import UpdateJob
from tasks.update.update_policy import update_policy_task
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of

# Nothing but the optimizer has to be read: no reference of a KL, no moving average.
SETTINGS = UPDATE.model_copy(update={"kl_coef": 0.0})


def made(job: UpdateJob) -> PolicyRef:
    """The version that the task makes and commits."""
    arguments = (job.policy, job.rollouts, job.advantages, job.model, job.updates, job.seed, job.max_staleness)
    return update_policy_task.fn(*arguments, "an iteration", job.placement)


def test_an_update_continues_with_the_optimizer_in_memory_as_with_the_stored_one(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rollouts = TEXTS.collect()
    advantages = advantages_of(rollouts)

    def after(policy: PolicyRef | None, learning_rate: float = SETTINGS.learning_rate) -> UpdateJob:
        update = SETTINGS.model_copy(update={"learning_rate": learning_rate})
        return job_of(TEXTS, rollouts, advantages, policy=policy, update=update)

    stored = Path(store.path("policies/000001/tokens")) / OPTIMIZER_FILE
    with run_resources():
        first = made(after(None))
        content = stored.read_bytes()
        stored.unlink()
        second = made(after(first))
    stored.write_bytes(content)
    assert second.checkpoint is not None
    with run_resources():
        read = alone(after(first), tmp_path / "read")
        assert (read.policy.digest, read.checkpoint_digest) == (second.digest, second.checkpoint.digest)
        # A failed update has changed the optimizer in memory.
        with monkeypatch.context() as patched:
            patched.setattr(CausalLMPolicy, "save_weights", _refuse)
            with pytest.raises(OSError, match="full"):
                made(after(second))
        third = made(after(second))
    with run_resources():
        assert alone(after(second), tmp_path / "again").policy.digest == third.digest
        # Other settings need another optimizer, which continues from the files.
        Path(store.path("policies/000003/tokens"), OPTIMIZER_FILE).unlink()
        with pytest.raises(StaleReferenceError, match=OPTIMIZER_FILE):
            made(after(third, learning_rate=1e-5))


def _refuse(self: CausalLMPolicy, folder: Path) -> None:
    raise OSError("the disk is full")
