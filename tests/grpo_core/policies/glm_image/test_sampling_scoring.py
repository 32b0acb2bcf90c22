"""Adapters on the head, half precision, and what another caller leaves in the model."""

import pytest
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.records import SampledTokens
from tests.tiny_policies import PROMPTS, build_policy


def drawn(policy: GlmImagePolicy, group_size: int = 2) -> SampledTokens:
    return policy.tokens.sample(PROMPTS, group_size=group_size, seeds=range(len(PROMPTS) * group_size))


@torch.no_grad()
def difference(policy: GlmImagePolicy, sampled: SampledTokens) -> Tensor:
    return (policy.tokens.logprobs(sampled.actions).logprobs - sampled.rollout_logprobs).abs()


def test_adapters_on_the_output_head_are_sampled_scored_and_trained(shipped_pipeline: GlmImagePipeline) -> None:
    lora = LoraSettings(4, 8.0, r"lm_head|.*layers\.0\.mlp\.down_proj")
    policy = build_policy(shipped_pipeline, lora=lora, disturbed=0.1)
    policy.tokens.trained.model.double()
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 1e-5
    assert float((policy.tokens.reference_logprobs(sampled.actions) - sampled.rollout_logprobs).abs().max()) > 0.01
    parameters = policy.tokens.trainable_parameters()
    found = torch.autograd.grad(policy.tokens.logprobs(sampled.actions).logprobs.sum(), list(parameters.values()))
    heads = [gradient for name, gradient in zip(parameters, found, strict=True) if "lm_head" in name]
    assert len(heads) == 2
    assert all(gradient.abs().sum() > 0 for gradient in heads)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_half_precision_over_fp32_weights_agrees_in_half_precision(
    shipped_pipeline: GlmImagePipeline, checkpointing: bool
) -> None:
    policy = build_policy(
        shipped_pipeline, autocast=torch.bfloat16, gradient_checkpointing=checkpointing, disturbed=0.02
    )
    exact = build_policy(shipped_pipeline, disturbed=0.02)
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 0.1
    off = float(difference(exact, sampled).max())
    assert 1e-3 < off < 0.3
    policy.tokens.prepare_for_update()

    def gradient(of: GlmImagePolicy) -> Tensor:
        parameters = list(of.tokens.trainable_parameters().values())
        parts = torch.autograd.grad(of.tokens.logprobs(sampled.actions).logprobs.sum(), parameters)
        return torch.cat([part.flatten() for part in parts])

    assert float(torch.cosine_similarity(gradient(policy), gradient(exact), 0)) > 0.99


def test_state_of_another_caller_changes_nothing(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline, width=64)
    sampled = drawn(policy)
    policy.tokens._base.model.rope_deltas, policy.tokens._base.model._prefill_len = torch.full((1, 1), 5), 3
    policy.tokens._base.model._cached_decode_position_ids = torch.full((1, 3, 43), 5)
    assert torch.equal(drawn(policy).actions.token_ids, sampled.actions.token_ids)
    assert float(difference(policy, sampled).max()) < 1e-4
