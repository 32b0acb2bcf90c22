"""Continuous batching samples from the policy's own distribution, and stores the log-probs that it sampled with."""

import pytest
import torch

from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.engines.continuous_batching import sampling
from grpo_core.records import SampledTokens
from tests.tiny_policies import TEXT_PROMPTS, build_text_policy

PARITY = 1e-5


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    settings = CausalLMSettings(max_completion_length=8, temperature=1.5, stop=("a",))
    policy = build_text_policy(settings, disturbed=0.05)
    # One that transformers would sample and the policy does not.
    policy.forbidden = torch.tensor([98])
    return policy


def sample(policy: CausalLMPolicy, first_seed: int) -> SampledTokens:
    done: list[int] = []
    rows = 3 * len(TEXT_PROMPTS)
    with sampling(policy, "float32", done.append):
        sampled = policy.sample_tokens(TEXT_PROMPTS, 3, range(first_seed, first_seed + rows))
    assert done == [rows]
    return sampled


def written(sampled: SampledTokens) -> list[tuple[int, ...]]:
    pairs = zip(sampled.actions.token_ids, sampled.actions.loss_mask, strict=True)
    return [tuple(row[kept].tolist()) for row, kept in pairs]


def test_log_probs_are_those_of_a_plain_pass(policy: CausalLMPolicy) -> None:
    sampled = sample(policy, 0)
    mask, ids = sampled.actions.loss_mask, sampled.actions.token_ids
    with torch.no_grad():
        scored = policy.logprobs(sampled.actions).logprobs
    assert float((scored - sampled.rollout_logprobs).abs().max()) <= PARITY
    rows = written(sampled)
    assert len(set(rows)) > len(rows) // 2
    assert not torch.isin(ids[mask], torch.tensor([98])).any()
    texts = [policy.stops.decode(row) for row in rows]
    ended = [row[-1] in policy.ends or "a" in text for row, text in zip(rows, texts, strict=True)]
    assert sampled.finished.tolist() == ended
    assert not any("a" in policy.stops.decode(row[:-1]) for row in rows)
    assert written(sample(policy, 0)) == rows
    assert written(sample(policy, 100)) != rows
    assert policy.engine is None
