"""Small language models of every type, made in code, with logits that depend on what is read."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from data.recipes.text import build_tokenizer
from grpo_core.policies.causal_lm.loading import train_language_model
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice
from tests.grpo_core.policies.trained.tiny_models import disturb

# Wider than the tokenizer, as heads padded to a round number are.
HEAD_ROWS = 288
_WIDTHS = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 268,
}
_ABSOLUTE = {"vocab_size": HEAD_ROWS, "bos_token_id": None, "eos_token_id": 268, "initializer_range": 0.3}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_WIDTHS),
    "qwen2": Qwen2Config(**_WIDTHS, tie_word_embeddings=True),
    "gpt2": GPT2Config(**_ABSOLUTE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # A window shorter than prompt and completion, and a cap that its logits reach.
    "gemma2": Gemma2Config(**_WIDTHS, head_dim=8, sliding_window=6, final_logit_softcapping=5.0),
    "granite": GraniteConfig(**_WIDTHS, logits_scaling=4.0),
    "cohere": CohereConfig(**_WIDTHS, logit_scale=0.25),
    "bloom": BloomConfig(**_ABSOLUTE, hidden_size=32, n_layer=2, n_head=4),
}
AFTER_HEAD = {"gemma2", "granite", "cohere"}


def make_model(kind: str) -> Any:
    """A model with seeded weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def make_tokenizer(*, pad: bool = True, template: bool = True) -> PreTrainedTokenizerFast:
    """The tiny text model's, with or without a pad token and a chat template."""
    tokenizer = build_tokenizer()
    if not pad:
        tokenizer.pad_token = None
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def change_inputs(model: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the model's body is given from now on."""

    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        change(named)
        return arguments, named

    model.base_model.register_forward_pre_hook(before, with_kwargs=True)


# What the defaults of transformers lack, and layers of each kind that published hybrids have.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 7], "num_hidden_layers": 8},
    "blenderbot": {"encoder_layers": 4, "decoder_layers": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
_LAYERS = 4


def configurations(model_type: str) -> list[Any]:
    """The default configuration with fewer layers, and with as many as it has, where they can be built."""
    kind = CONFIG_MAPPING[model_type]
    settings = dict(_SETTINGS.get(model_type, {}))
    found = []
    for layers in ({"num_hidden_layers": _LAYERS}, {}):
        try:
            config = kind(**layers | settings)
            if hasattr(config, "is_decoder") and not config.is_decoder:
                config = kind(is_decoder=True, **layers | settings)
        except Exception:
            continue
        found.append(config)
    return found


def small_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model of this type with narrow layers and random weights, in evaluation mode."""
    for config in configurations(model_type):
        values = small_values({**config.to_dict(), **changes})
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            try:
                return AutoModelForCausalLM.from_config(type(config).from_dict(values)).float().eval()
            except (AttributeError, ValueError):
                # Of fewer layers than its configuration names.
                continue
    raise AssertionError(f"no small {model_type}")


def small_policy(model: Any, choice: TrainingChoice, **settings: Any) -> CausalLMPolicy:
    """A policy over a small model, with the tiny tokenizer."""
    trained = train_language_model(model, choice, base_name="")
    if choice.lora is not None:
        disturb(trained.trainable_parameters(), 0.05)
    return CausalLMPolicy(trained, make_tokenizer(), CausalLMSettings(**settings))


# --- configurations with narrow layers

IDS = 288
"""The models read ids [0, IDS); those that have a meaning, such as the id of an image, are the last."""

_WINDOW = 4
_EXPERTS = 8
_STANDARD_DEVIATION = 0.04

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim")
_DIVIDED = re.compile(
    r"((\w+_)?(hidden_size|hidden_dim|d_model|n_embd|emb_dim|embedding_dim|embedding_size|embed_dim|embed_proj_dim|"
    r"intermediate_size\w*|ffn_dim|dff|dim_ff|ffn_hidden_size|d_inner|n_inner|d_ff|feed_forward_size|lora_rank|"
    r"d_ssm|dim_model_base|hidden_size_per_layer_input)|dim|lru_width|"
    r"(\w+_)?(heads|n_head|n?groups|query_groups)(_per_\w+)?)"
)
_VOCABULARY = re.compile(r"(\w+_)?vocab_size\w*|(\w+_)?vocab")
_SPECIAL_ID = re.compile(r"\w+_(token_id|token_index|token_ids)")
_TEXT_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "local_attention")
_LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(_WINDOWS, _WINDOW),
    **{"n_group": 2, "num_expert_group": 2, "topk_group": 1},
}


def small_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with narrow layers, and of those inside it, each by its own widths."""
    divisor = _divisor(values)
    return {name: _smaller(name, value, divisor) for name, value in values.items()}


def _divisor(values: Mapping[str, Any]) -> int:
    """Return the number that heads and widths are divided by: two heads are left, or few, as wide as they are."""
    heads = next((values[name] for name in _HEADS if values.get(name)), None)
    width = next((values[name] for name in _WIDTH if values.get(name)), None)
    if not isinstance(width, int):
        return 1
    if not isinstance(heads, int):
        return max(1, width // 64)
    common = math.gcd(heads, width)
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    best = max((number for number in divisors if heads // number >= 2), default=1)
    return best if best > 1 else common


def _smaller(name: str, value: Any, divisor: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict) and name.endswith("_config"):
        return small_values(value)
    if isinstance(value, float) and name in {"initializer_range", "init_std"}:
        # As large as keeps activations of these widths, so that logits depend on what is read.
        return _STANDARD_DEVIATION
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [_smaller(name, each, divisor) for each in value]
    if not isinstance(value, int):
        return value
    if _VOCABULARY.fullmatch(name):
        return min(value, IDS)
    if _SPECIAL_ID.fullmatch(name):
        return min(value, IDS - 1) if name in _TEXT_IDS else IDS - 1
    if name in _LIMITS:
        return min(value, _LIMITS[name])
    if _DIVIDED.fullmatch(name):
        divided = max(1, value // divisor)
        # Kernels want rows of whole 16 bytes.
        return divided if divided < 8 or name.endswith("heads") else divided // 8 * 8
    return value
