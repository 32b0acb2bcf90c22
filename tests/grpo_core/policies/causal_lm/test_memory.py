"""The estimate counts what is there, and moves as its settings do."""

from typing import Any

import pytest
import torch

from grpo_core.policies.causal_lm.memory import CausalLMSizes, checkpoint_bytes, estimate_memory, model_sizes
from grpo_core.policies.trained import TrainingChoice
from tests.grpo_core.policies.causal_lm.made_models import AFTER_HEAD, CONFIGS, make_model, make_tokenizer
from tests.tiny_text_policy import LORA, PROMPTS, build_text_policy

USUAL: dict[str, Any] = {
    "dtype": "float32",
    "max_completion_length": 10,
    "group_size": 4,
    "prompts_per_batch": 2,
    "micro_batch_size": 4,
    "prompt_tokens": 20,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_counts_are_those_of_the_model_itself(kind: str) -> None:
    sizes = model_sizes(CONFIGS[kind], lora_rank=LORA.rank)
    policy = build_text_policy(model=make_model(kind), tokenizer=make_tokenizer(), choice=TrainingChoice(lora=LORA))
    assert sizes.adapter == sum(part.numel() for part in policy.trainable_parameters().values())
    assert sizes.parameters == sum(part.numel() for part in make_model(kind).parameters())
    assert sizes.whole_logits == (kind in AFTER_HEAD)
    assert model_sizes(CONFIGS[kind]).adapter == 0


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_a_cache_takes_what_is_estimated(kind: str) -> None:
    model = make_model(kind)
    policy = build_text_policy(model=model, tokenizer=make_tokenizer())
    # Within Gemma 2's window, where every layer keeps all.
    ids = policy._encode(PROMPTS[1:2]).input_ids
    cache = model(input_ids=ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    settings = {**USUAL, "group_size": 1, "prompts_per_batch": 1, "max_completion_length": 1}
    memory = estimate_memory(model_sizes(CONFIGS[kind]), **{**settings, "prompt_tokens": ids.shape[1]})
    assert memory.part("key-value cache") == held


def test_each_setting_moves_the_estimate_its_way() -> None:
    whole, adapted = model_sizes(CONFIGS["llama"]), model_sizes(CONFIGS["llama"], lora_rank=4)
    usual = estimate_memory(adapted, **USUAL)
    full = estimate_memory(whole, **USUAL)
    assert full.part("optimizer moments") == 2 * full.part("weights") == 8 * whole.parameters
    assert full.update_peak > usual.update_peak
    assert estimate_memory(whole, **USUAL, eight_bit_optimizer=True).part("optimizer moments") == 2 * whole.parameters
    assert estimate_memory(whole, **USUAL, reference_on_device=True).part("reference model") == full.part("weights")
    halved = estimate_memory(adapted, **{**USUAL, "dtype": "bfloat16"})
    assert halved.part("key-value cache") * 2 == usual.part("key-value cache")
    assert estimate_memory(adapted, **{**USUAL, "group_size": 64}).update_peak == usual.update_peak
    assert estimate_memory(adapted, **{**USUAL, "group_size": 64}).rollout_peak > usual.rollout_peak
    deep = CausalLMSizes(**{**vars(adapted), "layers": 40})
    kept, again = (
        estimate_memory(deep, **USUAL, gradient_checkpointing=on).part("activations") for on in (False, True)
    )
    assert again < kept / 3


def test_a_checkpoint_is_what_is_trained_and_two_moments() -> None:
    sizes = model_sizes(CONFIGS["qwen2"], lora_rank=4)
    assert checkpoint_bytes(sizes, "bfloat16") == 12 * sizes.adapter
    assert checkpoint_bytes(model_sizes(CONFIGS["qwen2"]), "bfloat16") == 6 * sizes.parameters
