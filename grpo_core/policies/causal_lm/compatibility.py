"""Whether a model can be sampled and scored, tried on a small copy of it before any weights are read.

Layers stay as many and of the kinds that they are, because a single kind can decide whether a model can be sampled.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_core.errors import InputError, first_line
from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.prompts import pad_left
from grpo_core.policies.causal_lm.sampling_scoring import (
    SamplingRule,
    head_gives_logits,
    sample_completions,
    score_completions,
)
from grpo_core.settings import Truncation

IDS = 64
"""The copy reads ids [0, IDS); those that have a meaning, such as the id of an image, are among the upper half."""

MAX_PARAMETERS = 400_000_000
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
_LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "local_attention"), _WINDOW),
    **{"n_group": 2, "num_expert_group": 2, "topk_group": 1},
}


def small_copy(config: Any, seed: int) -> Any | None:
    """Build the copy, in evaluation mode, in fp32 on the CPU.

    Args:
        config: of the model.
        seed: of the random weights.

    Returns:
        None if there is no small copy of this configuration that can be built and run.
    """
    try:
        small = type(config).from_dict(_small(config.to_dict()))
        with torch.device("meta"):
            parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(small).parameters())
        if parameters > MAX_PARAMETERS:
            return None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            # A part may have a dtype of its own.
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).float().eval()
            model(input_ids=torch.arange(5, 10).unsqueeze(0))
    except Exception:
        # Whatever a configuration of other widths, or a model without its defaults, trips over.
        return None
    return model


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
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
        return _small(value)
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


TOLERANCE = 1e-3
"""In nats. Rounding is a few millionths in fp32, another position or another mask tenths."""

_PROMPTS = ([7, 11, 5], [9, 6, 13, 8, 12, 10, 14], [15, 6, 7, 5, 11])
_GROUP = 2
_TRIES = 3
_TRIED: dict[str, tuple[bool, str | None]] = {}
_TOKENS = 4
_IDS = IDS // 2


def refuse_incompatible(name: str, config: Any) -> bool:
    """Try a small copy of a model; no weights are read.

    Args:
        name: of the model, for the error.
        config: its configuration.

    Returns:
        False if no small copy can be built, so that only the model itself can answer.

    Raises:
        InputError: the model cannot be sampled and scored here.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _TRIED:
        _TRIED[key] = try_copy(config)
    tried, reason = _TRIED[key]
    _refuse(name, config, reason)
    return tried


def refuse_incompatible_model(name: str, model: Any) -> None:
    """Raise InputError if this model, with its weights, cannot be sampled and scored here."""
    _refuse(name, model.config, why_incompatible(model))


def _refuse(name: str, config: Any, reason: str | None) -> None:
    if reason is not None:
        hint = f"A {config.model_type} model cannot be trained here: {reason}. docs/models.md lists those that can."
        raise InputError("policy.model", name, hint)


def try_copy(config: Any) -> tuple[bool, str | None]:
    """Return whether a small copy could be built, and why it cannot be sampled and scored, if so."""
    reason = None
    # Rounding sends a token to another expert now and then, with other weights to the same; a fault is always there.
    for seed in range(_TRIES):
        copy = small_copy(config, seed)
        if copy is None:
            return False, None
        reason = why_incompatible(copy)
        # Some types magnify fp32's rounding in so small a copy (Gemma 3n); a fault is there in fp64 as well.
        if reason is None or why_incompatible(copy.double()) is None:
            return True, None
    return True, reason


@torch.no_grad()
def why_incompatible(model: Any) -> str | None:
    """Return why a model cannot be sampled and scored here; None if it can.

    Prompts of different lengths are sampled and scored together, twice each, and compared with a plain forward pass
    over each row. Numbers are compared in fp32 and above: in 16 bits rounding is as large as some faults.
    """
    try:
        return _unusable_cache(model) or _wrong_logprobs(model)
    except Exception as error:
        # Its own code may raise anything on arguments that it does not expect.
        return f"sampling from it, with one cache for the samples of a prompt, fails ({first_line(error)})"


def _unusable_cache(model: Any) -> str | None:
    prompts = pad_left(_PROMPTS, model.device)
    step = model(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        position_ids=prompts.position_ids,
        use_cache=True,
        logits_to_keep=1,
    )
    cache: Any = getattr(step, "past_key_values", None)
    layers = getattr(cache, "layers", None)
    if not layers:
        return "it gives no cache of keys and values"
    lacking = {type(layer).__name__ for layer in layers if not hasattr(layer, "batch_select_indices")}
    if not lacking:
        cache.batch_select_indices(_rows(model.device))
        lacking = {type(layer).__name__ for layer in layers if _stays_behind(layer)}
    if lacking:
        return f"layers keep a state that the samples of a prompt cannot share ({', '.join(sorted(lacking))})"
    return None


def _stays_behind(layer: Any) -> bool:
    """Return whether a layer's cache holds something for each prompt after the rows of samples were selected."""
    held = [each for value in vars(layer).values() for each in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(each, Tensor) and each.shape[:1] == (len(_PROMPTS),) for each in held)


def _rows(device: torch.device) -> Tensor:
    """Return which prompt each sample has."""
    return torch.arange(len(_PROMPTS), device=device).repeat_interleave(_GROUP)


def _wrong_logprobs(model: Any) -> str | None:
    rows = _rows(model.device)
    names = tuple(str(row) for row in rows.tolist())
    rule = SamplingRule(_IDS, temperature=1.0, truncation=Truncation(), ends=(), stops=None, max_tokens=_TOKENS)
    prompts = pad_left(_PROMPTS, model.device)
    sampled = sample_completions(model, prompts, names, rows, rule, range(len(rows)))
    ids = sampled.actions.token_ids.to(model.device)
    scored = score_completions(
        model,
        prompts.select(rows),
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        vocabulary=_IDS,
        temperature=1.0,
        support=None,
        entropy="none",
        whole_logits=not head_gives_logits(model),
    ).logprobs
    plain = torch.stack(
        [_plain_logprobs(model, _PROMPTS[row], written) for row, written in zip(rows.tolist(), ids, strict=True)]
    )
    if model.dtype not in (torch.float32, torch.float64):
        return None
    for kind, logprobs in (("while sampling", sampled.rollout_logprobs.to(plain.device)), ("while scoring", scored)):
        largest = float((logprobs - plain).abs().max())
        if not largest <= TOLERANCE:
            return f"log-probs {kind} differ by {largest:.2g} from those of one forward pass over a row alone"
    return None


def _plain_logprobs(model: Any, prompt: list[int], written: Tensor) -> Tensor:
    """Return the log-probs of a completion without a cache, padding, a mask or explicit positions."""
    read = torch.cat([torch.tensor(prompt, device=written.device), written])
    logits = model(input_ids=read.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return gather_logprobs(vocabulary_logprobs(logits, _IDS, 1.0), written)
