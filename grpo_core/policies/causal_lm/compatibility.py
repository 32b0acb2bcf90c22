"""What the sampler and the scorer need of a model, asked of it by sampling and scoring a few tokens."""

from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.prompts import pad_left
from grpo_core.policies.causal_lm.sampling import SamplingRule, sample_completions
from grpo_core.policies.causal_lm.scoring import head_gives_logits, score_completions
from grpo_core.policies.causal_lm.small_copy import IDS, small_copy
from grpo_core.sampling_settings import Truncation

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
        if reason is None:
            break
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
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"sampling from it, with one cache for the samples of a prompt, fails ({first_line})"


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
