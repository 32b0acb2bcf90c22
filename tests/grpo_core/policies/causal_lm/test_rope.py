"""Every kind of rotary embedding of transformers, up to the length that a model can read, and no further."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GlmConfig, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import read_context
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.prompts import prompt_ids
from grpo_core.policies.causal_lm.settings import CausalLMSettings, Context
from tests.grpo_core.policies.causal_lm.model_types import HEAD_ROWS, make_tokenizer
from tests.tiny_policies import build_text_policy

# Of the gate in fp32; another set of frequencies is a hundred times as far off.
PARITY = 1e-3
ORIGINAL, CONFIGURED = 20, 28
PROMPTS = ("ok", "sort it", "of banana")
WIDTHS: Mapping[str, Any] = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONFIGURED,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
PLAIN = CausalLMSettings(chat_template=False)
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [4.0, 6.0, 8.0, 16.0]
THETA: Mapping[str, Any] = {"rope_theta": 10000.0}
FACTORS = {**THETA, "factor": 4.0}
LONGROPE = {**FACTORS, "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LONGROPE["original_max_position_embeddings"] = ORIGINAL
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": THETA,
    "linear": FACTORS,
    "dynamic": FACTORS,
    "yarn": {**FACTORS, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONGROPE,
    "llama3": {
        **FACTORS,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {**FACTORS, "partial_rotary_factor": 0.5},
}
BY_LAYER = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
PHI = {**WIDTHS, "original_max_position_embeddings": ORIGINAL}
CONFIGS: Mapping[str, Any] = {
    **{
        f"llama, {kind}": LlamaConfig(**WIDTHS, rope_parameters={"rope_type": kind, **rope})
        for kind, rope in ROPES.items()
    },
    "half of each head, yarn": GlmConfig(
        **WIDTHS, head_dim=8, rope_parameters={"rope_type": "yarn", **ROPES["yarn"], "partial_rotary_factor": 0.5}
    ),
    "by layer, linear": Gemma3TextConfig(
        **WIDTHS,
        **BY_LAYER,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", **THETA},
            "full_attention": {"rope_type": "linear", **FACTORS},
        },
    ),
    "by layer, longrope": Gemma3TextConfig(
        **WIDTHS,
        **BY_LAYER,
        rope_parameters={"sliding_attention": {"rope_type": "default", **THETA}, "full_attention": LONGROPE},
    ),
    "phi3, default": Phi3Config(**PHI),
    "phi3, longrope": Phi3Config(**PHI, rope_parameters=dict(LONGROPE)),
    "phimoe, longrope": PhimoeConfig(
        **PHI,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.3},
    ),
}
CHANGING = {name for name in CONFIGS if "longrope" in name}


def made_policy(kind: str, max_completion_length: int, temperature: float = 1.0) -> CausalLMPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    settings = replace(PLAIN, max_completion_length=max_completion_length, temperature=temperature)
    policy = build_text_policy(
        settings, model=model if "phimoe" in kind else model.double(), tokenizer=make_tokenizer()
    )
    # Rows are as long as they can be.
    policy.ends = ()
    return policy


def room(kind: str) -> int:
    """How many tokens the longest of the prompts leaves."""
    length = read_context(CONFIGS[kind]).length
    assert length is not None
    return length - max(len(prompt_ids(make_tokenizer(), PLAIN, prompt)) for prompt in PROMPTS)


@torch.no_grad()
def difference_to_plain(policy: CausalLMPolicy) -> float:
    """The largest difference to one forward pass over a row alone, of rows of one batch, sampled and scored."""
    sampled = policy.sample_tokens(PROMPTS, group_size=1, seeds=range(len(PROMPTS)))
    tokens, scored = sampled.actions, policy.logprobs(sampled.actions).logprobs
    differences = []
    for row, prompt in enumerate(tokens.prompts):
        asked = policy.encode([prompt]).input_ids
        logits = policy._model(torch.cat([asked, tokens.token_ids[row : row + 1]], 1)).logits[
            0, asked.shape[1] - 1 : -1
        ]
        logprobs = torch.log_softmax(logits[:, : policy.vocabulary], -1)
        expected = logprobs.gather(1, tokens.token_ids[row].unsqueeze(1)).squeeze(1)
        differences += [(each[row] - expected).abs().max() for each in (sampled.rollout_logprobs, scored)]
    return float(max(differences))


def test_every_type_is_walked() -> None:
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}
    for kind, config in CONFIGS.items():
        assert read_context(config).length == (ORIGINAL if kind in CHANGING else CONFIGURED)


# The frequencies change with the length, by the length that they were made from, and by the layer.
QUICK = ("llama, dynamic", "llama, yarn", "half of each head, yarn", "by layer, longrope", "phimoe, longrope")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in CONFIGS]
)
def test_log_probs_of_the_longest_rows_are_those_of_a_plain_pass(kind: str) -> None:
    """Fixed types go past the length that they were made from; with LongRoPE that is the last."""
    assert difference_to_plain(made_policy(kind, room(kind))) < PARITY


@pytest.mark.parametrize("kind", ["by layer, longrope", "phi3, longrope"])
def test_rows_past_a_change_would_be_wrong_and_are_refused(kind: str) -> None:
    policy = made_policy(kind, room(kind) + 8)
    with pytest.raises(InputError, match=f"{ORIGINAL}, past which .* LongRoPE .*{CONFIGS[kind].model_type}.* change"):
        policy.sample_tokens(PROMPTS, group_size=1, seeds=range(len(PROMPTS)))
    policy.context = Context()
    assert difference_to_plain(policy) > 0.01
