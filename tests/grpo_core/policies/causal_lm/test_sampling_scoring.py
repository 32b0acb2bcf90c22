"""Rows leave the batch as they end, and what follows the head of a model is found."""

import string

import pytest
import torch

from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.sampling_scoring import head_gives_logits
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.records import SampledTokens
from tests.grpo_core.policies.causal_lm.model_types import (
    AFTER_HEAD,
    CONFIGS,
    change_inputs,
    make_model,
)
from tests.grpo_core.policies.samplers import make_text_policy
from tests.tiny_policies import TEXT_LORA, TEXT_PROMPTS


def drawn(policy: CausalLMPolicy) -> SampledTokens:
    return policy.sample_tokens(TEXT_PROMPTS, group_size=3, seeds=range(len(TEXT_PROMPTS) * 3))


def test_rows_that_have_ended_leave_the_batch() -> None:
    """And the rows that stay, some of them more than once moved, are sampled as alone."""
    policy = make_text_policy("llama", CausalLMSettings(max_completion_length=24, stop=tuple(string.ascii_lowercase)))
    fed: list[int] = []
    change_inputs(policy._model, lambda given: fed.append(len(given["input_ids"])))
    tokens = drawn(policy).actions
    assert fed[0] == len(TEXT_PROMPTS)
    assert fed[1:] == sorted(fed[1:], reverse=True)
    assert len(set(fed[1:])) > 2
    for row in range(len(tokens)):
        alone = policy.sample_tokens([tokens.prompts[row]], group_size=1, seeds=[row]).actions
        assert alone.token_ids[0, alone.loss_mask[0]].tolist() == tokens.token_ids[row, tokens.loss_mask[row]].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_follows_the_head_is_found(kind: str) -> None:
    assert head_gives_logits(make_model(kind)) == (kind not in AFTER_HEAD)


def test_a_cap_on_tiny_logits_is_found() -> None:
    model = make_model("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    assert not head_gives_logits(model)


@pytest.mark.parametrize("kind", sorted(AFTER_HEAD))
def test_scoring_past_what_follows_the_head_would_be_far_off(kind: str) -> None:
    policy = make_text_policy(kind, CausalLMSettings(max_completion_length=10))
    sampled = drawn(policy)
    policy.whole_logits = False
    with torch.no_grad():
        scored = policy.logprobs(sampled.actions).logprobs
    assert float((scored - sampled.rollout_logprobs).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_head_and_whole_logits_give_the_same_gradients(kind: str) -> None:
    gradients = []
    for whole in (False, True):
        policy = make_text_policy(kind, CausalLMSettings(max_completion_length=10, top_k=5), TrainingChoice(lora=None))
        tokens = drawn(policy).actions
        policy.whole_logits = whole
        scored = policy.logprobs(tokens, entropy="differentiable")
        (scored.logprobs.sum() + 0.1 * scored.entropy.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in policy.trainable_parameters().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_go_into_every_linear_layer_but_the_head(kind: str) -> None:
    policy = make_text_policy(kind, CausalLMSettings(), TrainingChoice(lora=TEXT_LORA))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable_parameters()}
    assert adapted == {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    }.get(kind, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
