"""The memory of an update, as bytes alive while it runs: microbatches count, groups and stored rollouts do not."""

from dataclasses import replace

import pytest
import torch
from diffusers import GlmImagePipeline

from grpo_core.optimizer import OptimizerSettings, PolicyOptimizer
from grpo_core.parity import ParityTolerance
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.records import TrainingRows
from grpo_core.sampling_settings import Truncation
from grpo_core.update import UpdateSettings, update_policy
from tests.grpo_core.policies.glm_image.live_bytes import PeakBytes
from tests.tiny_policy import PROMPTS, build_policy

PARITY = ParityTolerance(1e-4, 1e-4)
SETTINGS = UpdateSettings(minibatch_size=64, micro_batch_size=4, kl_coef=0.1, entropy_coef=0.01)


def group_rows(policy: GlmImagePolicy, group_size: int) -> TrainingRows:
    sampled = policy.tokens.sample(PROMPTS[:1], group_size=group_size, seeds=range(group_size))
    return TrainingRows(
        sample_ids=tuple(str(row) for row in range(group_size)),
        actions=sampled.actions,
        rollout_logprobs=sampled.rollout_logprobs,
        advantages=torch.linspace(-1, 1, group_size),
        finished=sampled.finished,
        on_policy=torch.ones(group_size, dtype=torch.bool),
        max_length=sampled.max_length,
    )


def peak_of_update(pipeline: GlmImagePipeline, group_size: int, micro_batch_size: int, *, checkpointed: bool) -> int:
    """Most bytes alive in an update of one step on one group, beside weights, rows and both recomputed log-probs."""
    policy = build_policy(
        pipeline, width=64, truncation=Truncation(top_p=0.9), gradient_checkpointing=checkpointed, disturbed=0.02
    )
    rows = group_rows(policy, group_size)
    support = rows.actions.support
    assert support is not None
    stored = [rows.actions.token_ids, rows.actions.loss_mask, support.ids, support.counts, rows.rollout_logprobs]
    weights = [*policy.tokens.trained.model.parameters(), *policy.tokens.trained.model.buffers()]
    optimizer = PolicyOptimizer(policy.tokens.trainable_parameters(), OptimizerSettings(1e-4))
    settings = replace(SETTINGS, micro_batch_size=micro_batch_size)
    with PeakBytes([*weights, *stored, rows.advantages]) as watched:
        update_policy(policy.tokens, optimizer, rows, settings, parity=PARITY, seed=0)
    return watched.peak - 2 * rows.rollout_logprobs.nbytes


@pytest.mark.parametrize("checkpointed", [True, False])
def test_memory_grows_with_the_microbatch_and_not_with_the_group(
    shipped_pipeline: GlmImagePipeline, checkpointed: bool
) -> None:
    small, middle, large = (peak_of_update(shipped_pipeline, size, 4, checkpointed=checkpointed) for size in (4, 8, 32))
    assert large == pytest.approx(middle, rel=0.01)
    # At the peak of a step's first microbatch there are no gradients yet.
    assert middle == pytest.approx(small, rel=0.04)
    assert peak_of_update(shipped_pipeline, 16, 8, checkpointed=checkpointed) > 1.8 * middle
