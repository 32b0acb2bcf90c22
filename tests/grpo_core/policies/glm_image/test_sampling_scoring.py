"""Stored and recomputed log-probs agree, and each known way to get them wrong is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.actions import TokenBatch
from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.records import SampledTokens
from grpo_core.settings import Truncation
from tests.tiny_policies import LORA, PROMPTS, build_policy

CODES = 73


def drawn(policy: GlmImagePolicy, group_size: int = 2) -> SampledTokens:
    return policy.tokens.sample(PROMPTS, group_size=group_size, seeds=range(len(PROMPTS) * group_size))


@torch.no_grad()
def difference(policy: GlmImagePolicy, sampled: SampledTokens) -> Tensor:
    return (policy.tokens.logprobs(sampled.actions).logprobs - sampled.rollout_logprobs).abs()


@pytest.fixture(scope="module")
def warm(shipped_pipeline: GlmImagePipeline) -> tuple[GlmImagePolicy, SampledTokens]:
    """A policy at temperature .9 whose adapters are not zero, and what it sampled; not to be changed."""
    policy = build_policy(shipped_pipeline, width=64, temperature=0.9, disturbed=0.05)
    return policy, drawn(policy)


@pytest.mark.parametrize(
    ("height", "width", "trained", "temperature"),
    [
        (32, 32, "fresh adapters", 1.0),
        (32, 64, "trained adapters", 0.9),
        (64, 40, "trained adapters", 1.0),
        (64, 40, "full weights", 0.9),
    ],
)
def test_stored_and_recomputed_log_probs_agree(
    shipped_pipeline: GlmImagePipeline, height: int, width: int, trained: str, temperature: float
) -> None:
    policy = build_policy(
        shipped_pipeline,
        height=height,
        width=width,
        temperature=temperature,
        lora=None if trained == "full weights" else LORA,
        disturbed=0.0 if trained == "fresh adapters" else 0.02,
    )
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 1e-4
    policy.tokens.prepare_for_update()
    assert float(difference(policy, sampled).max()) < 1e-4


def test_a_padded_row_is_scored_as_alone(warm: tuple[GlmImagePolicy, SampledTokens]) -> None:
    policy, sampled = warm
    with torch.no_grad():
        together = policy.tokens.logprobs(sampled.actions)
        for row in range(len(sampled.actions)):
            alone = policy.tokens.logprobs(sampled.actions.select([row]))
            torch.testing.assert_close(alone.logprobs[0], together.logprobs[row], rtol=0, atol=1e-5)
            torch.testing.assert_close(alone.entropy[0], together.entropy[row], rtol=0, atol=1e-5)


# --- truncated sampling

TRUNCATIONS = {
    "top_k": Truncation(top_k=5),
    "top_p": Truncation(top_p=0.75),
    "min_p": Truncation(min_p=0.05),
    "all three": Truncation(top_k=20, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_log_probs_over_the_stored_ids_agree_and_the_gate_catches_others(
    shipped_pipeline: GlmImagePipeline, truncation: Truncation
) -> None:
    """The released model's own sampling is top_p 0.75 at temperature 0.9."""
    policy = build_policy(shipped_pipeline, width=64, temperature=0.9, truncation=truncation, disturbed=0.05)
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 1e-5
    policy.tokens.prepare_for_update()
    assert float(difference(policy, sampled).max()) < 1e-5
    with torch.no_grad():
        alone = policy.tokens.logprobs(sampled.actions.select([5])).logprobs
    torch.testing.assert_close(alone, sampled.rollout_logprobs[[5]], rtol=0, atol=1e-5)
    everything = replace(sampled, actions=replace(sampled.actions, support=None))
    assert float(difference(policy, everything).max()) > 0.01
    names = [str(row) for row in range(len(sampled.actions))]
    with torch.no_grad():
        old = policy.tokens.logprobs(everything.actions).logprobs
    report = measure_parity(names, sampled.rollout_logprobs, old, sampled.actions.loss_mask)
    with pytest.raises(ParityError, match="top-k and top-p"):
        require_parity(report, ParityTolerance(0.1, 0.01))


# --- the model's parts


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


# --- the ways to get them wrong


def by_hand(policy: GlmImagePolicy, tokens: TokenBatch) -> dict[str, Any]:
    """Arguments of one forward pass over prompt and tokens, as they should be."""
    encoded = policy.tokens.encode(tokens.prompts, policy.tokens.sizes_of(tokens), None)
    ids = torch.cat([encoded.input_ids, tokens.token_ids[:, :-1]], 1)
    sampled = torch.ones_like(tokens.token_ids[:, :-1])
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([encoded.attention_mask, sampled], 1),
        "position_ids": torch.cat([encoded.position_ids, encoded.positions(sampled.shape[1])], -1),
        "temperature": tokens.temperature,
        "vocabulary": CODES,
    }


@torch.no_grad()
def scored(policy: GlmImagePolicy, tokens: TokenBatch, arguments: dict[str, Any]) -> Tensor:
    temperature, codes = arguments.pop("temperature"), arguments.pop("vocabulary")
    logits = policy.tokens._base(**arguments, use_cache=False).logits[:, -tokens.token_ids.shape[1] :, :codes]
    return torch.log_softmax(logits / temperature, -1).gather(-1, tokens.token_ids.unsqueeze(-1)).squeeze(-1)


def _grids_swapped(arguments: dict[str, Any]) -> None:
    """Large grid first, as image_grid_thw lists them, in place of preview first."""
    positions, time = arguments["position_ids"], 10 + 32
    prompt = positions.shape[2] - (time - 1)
    preview, large = positions[:, :, prompt : prompt + 10], positions[:, :, prompt + 10 :]
    arguments["position_ids"] = torch.cat([positions[:, :, :prompt], large, preview], -1)


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], object], float]] = {
    "none": (lambda arguments: None, 0.0),
    "no position_ids": (lambda arguments: arguments.pop("position_ids"), 1.0),
    "no attention_mask": (lambda arguments: arguments.pop("attention_mask"), 1.0),
    "temperature 1": (lambda arguments: arguments.update(temperature=1.0), 0.1),
    "all ids of the head": (lambda arguments: arguments.update(vocabulary=88), 0.1),
    "grids in the order of the processor": (_grids_swapped, 1.0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_known_mistake_is_far_beyond_the_tolerance(
    warm: tuple[GlmImagePolicy, SampledTokens], mistake: str
) -> None:
    policy, sampled = warm
    arguments = by_hand(policy, sampled.actions)
    make, at_least = MISTAKES[mistake]
    make(arguments)
    off = float((scored(policy, sampled.actions, arguments) - sampled.rollout_logprobs).abs().max())
    assert off > at_least if at_least else off < 1e-4


def test_state_of_another_caller_changes_nothing(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline, width=64)
    sampled = drawn(policy)
    policy.tokens._base.model.rope_deltas, policy.tokens._base.model._prefill_len = torch.full((1, 1), 5), 3
    policy.tokens._base.model._cached_decode_position_ids = torch.full((1, 3, 43), 5)
    assert torch.equal(drawn(policy).actions.token_ids, sampled.actions.token_ids)
    assert float(difference(policy, sampled).max()) < 1e-4


# --- transformers as the oracle


def stock_inputs(policy: GlmImagePolicy, prompt: str) -> Any:
    return policy.tokens.pipeline.processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]],
        tokenize=True,
        return_dict=True,
        processor_kwargs={
            "target_h": policy.settings.height,
            "target_w": policy.settings.width,
            "return_tensors": "pt",
        },
    )


@pytest.mark.parametrize(("height", "width", "prompt"), [(32, 64, PROMPTS[1]), (64, 40, PROMPTS[2])])
def test_greedy_tokens_are_those_of_generate(
    shipped_pipeline: GlmImagePipeline, height: int, width: int, prompt: str
) -> None:
    """At a temperature of nearly zero the sampler takes the likeliest id, as generate() does of one prompt."""
    policy = build_policy(shipped_pipeline, height=height, width=width, temperature=1e-6)
    time = policy.tokens.grids.tokens
    inputs = stock_inputs(policy, prompt)
    generated = policy.tokens._base.generate(
        **inputs, do_sample=False, top_p=None, temperature=None, max_new_tokens=time, min_new_tokens=time
    )
    sampled = policy.tokens.sample([prompt], group_size=1, seeds=[0]).actions.token_ids
    assert torch.equal(sampled, generated[:, inputs["input_ids"].shape[1] :])


@torch.no_grad()
def test_log_probs_are_those_of_the_models_own_prefill_and_decode(shipped_pipeline: GlmImagePipeline) -> None:
    """Token by token, with the positions that the model keeps for itself after its prefill."""
    policy = build_policy(shipped_pipeline, width=64, disturbed=0.05)
    sampled = policy.tokens.sample(PROMPTS[1:2], group_size=1, seeds=[4])
    inputs = stock_inputs(policy, PROMPTS[1])
    attention = inputs.pop("attention_mask")
    output = policy.tokens._base(**inputs, attention_mask=attention, use_cache=True)
    expected = []
    for token in sampled.actions.token_ids[0]:
        expected.append(torch.log_softmax(output.logits[0, -1, :CODES], -1)[token])
        attention = torch.cat([attention, attention.new_ones(1, 1)], 1)
        output = policy.tokens._base(
            input_ids=token.reshape(1, 1),
            attention_mask=attention,
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    torch.testing.assert_close(torch.stack(expected), sampled.rollout_logprobs[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        torch.stack(expected), policy.tokens.logprobs(sampled.actions).logprobs[0], rtol=0, atol=1e-4
    )


# --- groups, seeds, ids


def test_a_shared_prefill_equals_one_a_sibling(warm: tuple[GlmImagePolicy, SampledTokens]) -> None:
    policy, shared = warm
    alone = policy.tokens.sample(shared.actions.prompts, group_size=1, seeds=range(8))
    assert torch.equal(alone.actions.token_ids, shared.actions.token_ids)
    torch.testing.assert_close(alone.rollout_logprobs, shared.rollout_logprobs, rtol=0, atol=1e-5)


def test_siblings_differ_by_seed_alone(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline)
    ids = policy.tokens.sample(PROMPTS[:1], group_size=3, seeds=[5, 6, 5]).actions.token_ids
    assert torch.equal(ids[0], ids[2])
    assert not torch.equal(ids[0], ids[1])
    torch.manual_seed(0)
    assert torch.equal(policy.tokens.sample(PROMPTS[:1], group_size=1, seeds=[6]).actions.token_ids[0], ids[1])


def test_only_codes_are_sampled_however_likely_the_end_token_is(shipped_pipeline: GlmImagePipeline) -> None:
    """The head is turned so that end and text ids win everywhere; the log-probs are those over the codes."""
    policy = build_policy(shipped_pipeline)
    with torch.no_grad():
        policy.tokens._base.lm_head.weight[CODES:] = policy.tokens._base.lm_head.weight[:15] * 20
    sampled = drawn(policy)
    assert int(sampled.actions.token_ids.max()) < CODES
    assert int(sampled.actions.token_ids.min()) >= 0
    assert float(difference(policy, sampled).max()) < 1e-4
    assert float(sampled.rollout_logprobs.mean()) > -8
