"""Whether a model can be sampled and scored, tried on a small copy of it before any weights are read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import InputError, first_line
from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.prompts import EncodedPrompts, pad_left
from grpo_core.policies.causal_lm.sampling_scoring import (
    SamplingRule,
    head_gives_logits,
    sample_completions,
    score_completions,
    without_router_losses,
)
from grpo_core.policies.causal_lm.small_copy import IDS, small_copy
from grpo_core.policies.trained.quantization import quantized_layers
from grpo_core.records import SampledTokens
from grpo_core.settings import Truncation

TOLERANCE = 1e-3
"""In nats. Rounding is a few millionths in fp32, another position or another mask tenths."""

PAGE = "docs/models.md"
_PROMPTS = ([7, 11, 5], [9, 6, 13, 8, 12, 10, 14], [15, 6, 7, 5, 11])
_GROUP = 2
_TRIES = 3
_TRIED: dict[str, tuple[bool, str | None]] = {}
_TOKENS = 4
TEXT_IDS = IDS // 2


@dataclass(frozen=True)
class Trial:
    """The prompts that a model is tried on.

    Attributes:
        prompts: of different lengths.
        vocabulary: ids [0, vocabulary) are sampled.
        plain: the index of a prompt and a completion -> logits [time, ids] of one forward pass over this row alone,
            without a cache, padding, a mask or explicit positions.
        forbidden: ids that are not sampled; None: there are none.
    """

    prompts: EncodedPrompts
    vocabulary: int
    plain: Callable[[int, Tensor], Tensor]
    forbidden: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Which prompt each sample has."""
        ids = self.prompts.input_ids
        return torch.arange(len(ids), device=ids.device).repeat_interleave(_GROUP)


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
    return refuse_tried(name, config, "", partial(try_copy, config))


def refuse_tried(
    name: str, config: Any, key: str, attempt: Callable[[], tuple[bool, str | None]], page: str = PAGE
) -> bool:
    """Try a small copy of a model once in this process.

    Args:
        name: of the model, for the error.
        config: its configuration.
        key: what the result depends on beside the configuration.
        attempt: returns whether a small copy could be built, and why it cannot be used.
        page: of the documentation that lists what runs.

    Returns:
        False if no small copy can be built, so that only the model itself can answer.

    Raises:
        InputError: the model cannot be sampled and scored here.
    """
    key = config.to_json_string(use_diff=False) + key
    if key not in _TRIED:
        _TRIED[key] = attempt()
    tried, reason = _TRIED[key]
    refuse_reason(name, config, reason, page)
    return tried


def refuse_incompatible_model(name: str, model: Any) -> None:
    """Raise InputError if this model, with its weights, cannot be sampled and scored here."""
    refuse_reason(name, model.config, why_incompatible(model))


def refuse_reason(name: str, config: Any, reason: str | None, page: str = PAGE) -> None:
    """Raise InputError with the reason why a model cannot be used, if there is one."""
    if reason is not None:
        hint = f"A {config.model_type} model cannot be trained here: {reason}. {page} lists those that can."
        raise InputError("policy.model", name, hint)


def try_copy(config: Any) -> tuple[bool, str | None]:
    """Return whether a small copy could be built, and why it cannot be sampled and scored, if so."""
    return try_copies(partial(small_copy, config), why_incompatible)


def try_copies(small: Callable[[int], Any | None], why: Callable[[Any], str | None]) -> tuple[bool, str | None]:
    """Return whether a small copy could be built, and why none can be sampled and scored, if so.

    Args:
        small: builds a copy from the seed of its weights; None if it cannot be built.
        why: returns why a copy cannot be used; None if it can.
    """
    reason = None
    # Rounding sends a token to another expert now and then, with other weights to the same; a fault is always there.
    for seed in range(_TRIES):
        copy = small(seed)
        if copy is None:
            return False, None
        reason = why(copy)
        # Some types magnify fp32's rounding in so small a copy (Gemma 3n); a fault is there in fp64 as well.
        if reason is None or why(copy.double()) is None:
            return True, None
    return True, reason


@torch.no_grad()
def why_incompatible(model: Any) -> str | None:
    """Return why a model cannot be sampled and scored here; None if it can."""

    def plain(index: int, written: Tensor) -> Tensor:
        read = torch.cat([torch.tensor(_PROMPTS[index], device=written.device), written])
        logits: Tensor = model(input_ids=read.unsqueeze(0)).logits
        return logits[0, len(_PROMPTS[index]) - 1 : -1]

    return why_trial_fails(model, lambda: Trial(pad_left(_PROMPTS, model.device), TEXT_IDS, plain))


@torch.no_grad()
def why_trial_fails(model: Any, prepare: Callable[[], Trial]) -> str | None:
    """Return why a model cannot be sampled and scored here; None if it can.

    Prompts of different lengths are sampled and scored together, twice each, and compared with a plain forward pass
    over each row. Numbers are compared in fp32 and above: in 16 bits rounding is as large as some faults.
    """
    try:
        trial = prepare()
        return _unusable_cache(model, trial) or _wrong_logprobs(model, trial)
    except Exception as error:
        # Its own code may raise anything on arguments that it does not expect.
        return f"sampling from it, with one cache for the samples of a prompt, fails ({first_line(error)})"


def _unusable_cache(model: Any, trial: Trial) -> str | None:
    prompts = trial.prompts
    step = model(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        position_ids=prompts.position_ids,
        use_cache=True,
        logits_to_keep=1,
        **prompts.arguments(),
        **without_router_losses(model),
    )
    cache: Any = getattr(step, "past_key_values", None)
    layers = getattr(cache, "layers", None)
    if not layers:
        return "it gives no cache of keys and values"
    lacking = {type(layer).__name__ for layer in layers if not hasattr(layer, "batch_select_indices")}
    if not lacking:
        cache.batch_select_indices(trial.rows)
        lacking = {type(layer).__name__ for layer in layers if _stays_behind(layer, len(prompts.input_ids))}
    if lacking:
        return f"layers keep a state that the samples of a prompt cannot share ({', '.join(sorted(lacking))})"
    return None


def _stays_behind(layer: Any, prompts: int) -> bool:
    """Return whether a layer's cache holds something for each prompt after the rows of samples were selected."""
    held = [each for value in vars(layer).values() for each in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(each, Tensor) and each.shape[:1] == (prompts,) for each in held)


def _wrong_logprobs(model: Any, trial: Trial) -> str | None:
    rows = trial.rows
    sampled = sample_trial(model, trial)
    ids = sampled.actions.token_ids.to(model.device)
    scored = score_trial(model, trial, ids)
    plain = torch.stack(
        [
            _plain_logprobs(trial, trial.plain(row, written), written)
            for row, written in zip(rows.tolist(), ids, strict=True)
        ]
    )
    # Rounding of activations to 8 bits, or in 16, is as large as some faults.
    if model.dtype not in (torch.float32, torch.float64) or any(quantized_layers(model)):
        return None
    for kind, logprobs in (("while sampling", sampled.rollout_logprobs.to(plain.device)), ("while scoring", scored)):
        largest = float((logprobs - plain).abs().max())
        if not largest <= TOLERANCE:
            return f"log-probs {kind} differ by {largest:.2g} from those of one forward pass over a row alone"
    return None


def _plain_logprobs(trial: Trial, logits: Tensor, written: Tensor) -> Tensor:
    return gather_logprobs(vocabulary_logprobs(logits, trial.vocabulary, 1.0, trial.forbidden), written)


def sample_trial(model: Any, trial: Trial) -> SampledTokens:
    """Sample each of the prompts some times."""
    rows = trial.rows
    names = tuple(str(row) for row in rows.tolist())
    rule = SamplingRule(
        trial.vocabulary,
        temperature=1.0,
        truncation=Truncation(),
        ends=(),
        stops=None,
        max_tokens=_TOKENS,
        forbidden=trial.forbidden,
    )
    return sample_completions(model, trial.prompts, names, rows, rule, range(len(rows)))


def score_trial(model: Any, trial: Trial, ids: Tensor) -> Tensor:
    """Compute the log-probs of sampled ids [rows, time]."""
    return score_completions(
        model,
        trial.prompts.select(trial.rows),
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        vocabulary=trial.vocabulary,
        temperature=1.0,
        support=None,
        entropy="none",
        whole_logits=not head_gives_logits(model),
        forbidden=trial.forbidden,
    ).logprobs
