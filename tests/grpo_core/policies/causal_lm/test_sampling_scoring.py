"""Stored and recomputed log-probs agree on every architecture, and each known way to get them wrong is seen."""

import string
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
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
    make_tokenizer,
)
from tests.tiny_policies import TEXT_LORA, TEXT_PROMPTS, build_text_policy

PARITY = 1e-5
# Models compute in fp64 where they can: in fp32 some CPUs' kernels differ by more than PARITY between the two passes.
PADDED_ROWS_NEED_FP32 = {"gemma2", "bloom"}
SAMPLERS = {
    "whole distribution": CausalLMSettings(max_completion_length=10),
    "warm": CausalLMSettings(max_completion_length=10, temperature=0.7),
    "top_k": CausalLMSettings(max_completion_length=10, top_k=5),
    "top_p": CausalLMSettings(max_completion_length=10, top_p=0.8),
    "min_p": CausalLMSettings(max_completion_length=10, min_p=0.1),
    "all cuts": CausalLMSettings(max_completion_length=10, top_k=20, top_p=0.9, min_p=0.02, temperature=1.3),
    "stop texts": CausalLMSettings(max_completion_length=10, stop=("a", "e", "z", "of")),
}


def made_policy(kind: str, settings: CausalLMSettings, **arguments: Any) -> CausalLMPolicy:
    tokenizer = make_tokenizer(pad=kind != "llama", template=kind != "gpt2")
    model = make_model(kind) if kind in PADDED_ROWS_NEED_FP32 else make_model(kind).double()
    return build_text_policy(settings, model=model, tokenizer=tokenizer, disturbed=0.05, **arguments)


def drawn(policy: CausalLMPolicy, group_size: int = 3) -> SampledTokens:
    return policy.sample_tokens(TEXT_PROMPTS, group_size=group_size, seeds=range(len(TEXT_PROMPTS) * group_size))


@torch.no_grad()
def difference(policy: CausalLMPolicy, sampled: SampledTokens) -> float:
    scored = policy.logprobs(sampled.actions).logprobs
    assert not scored[~sampled.actions.loss_mask].any()
    return float((scored - sampled.rollout_logprobs).abs().max())


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [*((kind, "all cuts") for kind in CONFIGS), *((kind, each) for kind in ("llama", "gemma2") for each in SAMPLERS)],
)
def test_stored_and_recomputed_log_probs_agree(kind: str, sampler: str) -> None:
    policy = made_policy(kind, SAMPLERS[sampler])
    sampled = drawn(policy)
    assert float(sampled.rollout_logprobs.abs().max()) > 0.1
    assert difference(policy, sampled) < PARITY
    policy.prepare_for_update()
    assert difference(policy, sampled) < PARITY


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_row_is_scored_as_alone(kind: str) -> None:
    policy = made_policy(kind, SAMPLERS["top_p"])
    tokens = drawn(policy).actions
    with torch.no_grad():
        together = policy.logprobs(tokens)
        for row in range(len(tokens)):
            alone = policy.logprobs(tokens.select([row]).trimmed())
            time = alone.logprobs.shape[1]
            torch.testing.assert_close(alone.logprobs[0], together.logprobs[row, :time], rtol=0, atol=PARITY)
            torch.testing.assert_close(alone.entropy[0], together.entropy[row, :time], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sample_depends_on_its_prompt_and_seed_alone(kind: str) -> None:
    policy = made_policy(kind, SAMPLERS["whole distribution"])
    together = drawn(policy).actions
    for row in (4, 11):
        alone = policy.sample_tokens([together.prompts[row]], group_size=1, seeds=[row]).actions
        assert (
            alone.token_ids[0, alone.loss_mask[0]].tolist() == together.token_ids[row, together.loss_mask[row]].tolist()
        )


def test_rows_that_have_ended_leave_the_batch() -> None:
    """And the rows that stay, some of them more than once moved, are sampled as alone."""
    policy = made_policy("llama", CausalLMSettings(max_completion_length=24, stop=tuple(string.ascii_lowercase)))
    fed: list[int] = []
    change_inputs(policy._model, lambda given: fed.append(len(given["input_ids"])))
    tokens = drawn(policy).actions
    assert fed[0] == len(TEXT_PROMPTS)
    assert fed[1:] == sorted(fed[1:], reverse=True)
    assert len(set(fed[1:])) > 2
    for row in range(len(tokens)):
        alone = policy.sample_tokens([tokens.prompts[row]], group_size=1, seeds=[row]).actions
        assert alone.token_ids[0, alone.loss_mask[0]].tolist() == tokens.token_ids[row, tokens.loss_mask[row]].tolist()


def test_a_prompt_that_comes_twice_is_sampled_twice() -> None:
    policy = build_text_policy()
    requested = (TEXT_PROMPTS[0], TEXT_PROMPTS[1], TEXT_PROMPTS[0])
    sampled = policy.sample_tokens(requested, group_size=2, seeds=[5, 6, 7, 8, 5, 6]).actions
    assert sampled.prompts == (requested[0], requested[0], requested[1], requested[1], requested[0], requested[0])
    assert torch.equal(sampled.token_ids[:2], sampled.token_ids[4:])


# --- transformers as the oracle


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    policy = made_policy(kind, CausalLMSettings(max_completion_length=10, temperature=1e-5))
    model = policy._model
    for prompt in TEXT_PROMPTS[:2]:
        encoded = policy.encode([prompt])
        likeliest = model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            do_sample=False,
            max_new_tokens=10,
            pad_token_id=0,
            suppress_tokens=list(range(policy.vocabulary, model.config.vocab_size)),
        )[0, encoded.length :].tolist()
        sampled = policy.sample_tokens([prompt], group_size=1, seeds=[0]).actions
        assert sampled.token_ids[0, sampled.loss_mask[0]].tolist() == likeliest


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_log_probs_are_those_of_an_unpadded_forward_pass(kind: str) -> None:
    policy = made_policy(kind, SAMPLERS["warm"])
    sampled = drawn(policy, group_size=1)
    tokens = sampled.actions
    for row, prompt in enumerate(tokens.prompts):
        ids = tokens.token_ids[row, tokens.loss_mask[row]]
        requested = policy.encode([prompt]).input_ids
        logits = policy._model(torch.cat([requested, ids.unsqueeze(0)], 1)).logits[0, requested.shape[1] - 1 : -1]
        expected = (
            torch.log_softmax(logits[:, : policy.vocabulary].float() / 0.7, -1).gather(1, ids.unsqueeze(1)).squeeze(1)
        )
        torch.testing.assert_close(sampled.rollout_logprobs[row, : len(ids)], expected, rtol=0, atol=PARITY)


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
    policy = made_policy(kind, SAMPLERS["whole distribution"])
    sampled = drawn(policy)
    policy.whole_logits = False
    assert difference(policy, sampled) > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_head_and_whole_logits_give_the_same_gradients(kind: str) -> None:
    gradients = []
    for whole in (False, True):
        policy = made_policy(kind, SAMPLERS["top_k"], choice=TrainingChoice(lora=None))
        tokens = drawn(policy).actions
        policy.whole_logits = whole
        scored = policy.logprobs(tokens, entropy="differentiable")
        (scored.logprobs.sum() + 0.1 * scored.entropy.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in policy.trainable_parameters().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4)


# --- the ways to get them wrong


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "no position_ids, absolute positions": ("gpt2", lambda given: given.pop("position_ids")),
    "no attention_mask": ("llama", lambda given: given.update(attention_mask=torch.ones_like(given["input_ids"]))),
    "positions shifted in the completion": (
        "gpt2",
        lambda given: given.update(position_ids=given["position_ids"].clamp(max=20)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_gate_sees_each_known_mistake(mistake: str) -> None:
    kind, change = MISTAKES[mistake]
    policy = made_policy(kind, SAMPLERS["whole distribution"])
    sampled = drawn(policy)
    change_inputs(policy._model, change)
    with torch.no_grad():
        wrong = policy.logprobs(sampled.actions).logprobs
    names = [str(row) for row in range(len(sampled.actions))]
    report = measure_parity(names, sampled.rollout_logprobs, wrong, sampled.actions.loss_mask)
    assert report.max_difference > 0.5
    with pytest.raises(ParityError):
        require_parity(report, ParityTolerance(1e-3, 1e-4))


def test_ids_without_text_are_never_drawn_and_have_no_mass() -> None:
    """The last rows of the head belong to no id of the tokenizer; here they would take nearly all the mass."""
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[269:] = model.lm_head.weight[:19] * 3
    policy = build_text_policy(SAMPLERS["whole distribution"], model=model.double(), tokenizer=make_tokenizer())
    sampled = drawn(policy, group_size=16)
    assert int(sampled.actions.token_ids.max()) < 269
    assert difference(policy, sampled) < PARITY


# --- adapters


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_go_into_every_linear_layer_but_the_head(kind: str) -> None:
    policy = made_policy(kind, SAMPLERS["warm"], choice=TrainingChoice(lora=TEXT_LORA))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable_parameters()}
    assert adapted == {
        "gpt2": {"c_attn", "c_proj", "c_fc"},
        "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    }.get(kind, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
