"""Configurations of language models with narrow layers; layers stay of the kinds that they are."""

import math
import re
from collections.abc import Mapping
from typing import Any

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
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "local_attention")
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(WINDOWS, _WINDOW),
    **{"n_group": 2, "num_expert_group": 2, "topk_group": 1},
}


def small_values(values: Mapping[str, Any], limits: Mapping[str, int] = LIMITS) -> dict[str, Any]:
    """Return the values of a configuration with narrow layers, and of those inside it, each by its own widths.

    Args:
        values: by the name of the field.
        limits: largest values of some fields.
    """
    divisor = _divisor(values)
    return {name: _smaller(name, value, divisor, limits) for name, value in values.items()}


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


def _smaller(name: str, value: Any, divisor: int, limits: Mapping[str, int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict) and name.endswith("_config"):
        return small_values(value, limits)
    if isinstance(value, float) and name in {"initializer_range", "init_std"}:
        # As large as keeps activations of these widths, so that logits depend on what is read.
        return _STANDARD_DEVIATION
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [_smaller(name, each, divisor, limits) for each in value]
    if not isinstance(value, int):
        return value
    if _VOCABULARY.fullmatch(name):
        return min(value, IDS)
    if _SPECIAL_ID.fullmatch(name):
        return min(value, IDS - 1) if name in _TEXT_IDS else IDS - 1
    if name in limits:
        return min(value, limits[name])
    if _DIVIDED.fullmatch(name):
        divided = max(1, value // divisor)
        # Kernels want rows of whole 16 bytes.
        return divided if divided < 8 or name.endswith("heads") else divided // 8 * 8
    return value
