"""The autoregressive loop: one prefill of the distinct prompts, a shared cache, one random number per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.policies.causal_lm.stopping import StopTexts
from grpo_core.records import TokenSupport
from grpo_core.sampling import SupportRecorder, Truncation, draw_tokens, truncate, uniform_numbers


@dataclass(frozen=True)
class Completions:
    """Sampled completions, padded on the right to the longest row.

    Attributes:
        token_ids: including the end token; zero after it.
        loss_mask: True for a sampled token.
        logprobs: of each sampled id under the distribution it was sampled from; zero where masked.
        finished: False for a row that was truncated at the maximum length.
        support: the ids that could be sampled; None without truncation.
    """

    token_ids: Int[Tensor, "rows time"]
    loss_mask: Bool[Tensor, "rows time"]
    logprobs: Float[Tensor, "rows time"]
    finished: Bool[Tensor, " rows"]
    support: TokenSupport | None


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is sampled from logits, and when to stop.

    Attributes:
        vocabulary: ids [0, vocabulary) can be sampled.
        temperature: divides the logits.
        truncation: which of these ids can be sampled.
        ends: ids that end a row; they are sampled and trained as any other.
        stops: texts that end a row.
        max_tokens: of a row.
    """

    vocabulary: int
    temperature: float
    truncation: Truncation
    ends: tuple[int, ...]
    stops: StopTexts
    max_tokens: int


@torch.no_grad()
def sample_completions(
    model: Any, encoded: EncodedPrompts, rows: Int[Tensor, " rows"], rule: SamplingRule, seeds: Sequence[int]
) -> Completions:
    """Sample one completion per row; the loop ends when every row has ended.

    Args:
        model: a causal language model of transformers.
        encoded: distinct prompts.
        rows: index of the prompt that each row continues.
        rule: the distribution and the end of a row.
        seeds: one per row.
    """
    step = model(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids,
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits = _shared_cache(step.past_key_values, rows), step.logits[rows, -1]
    lengths, attention = encoded.lengths[rows], encoded.attention_mask[rows]
    attention = torch.cat([attention, attention.new_ones(len(rows), rule.max_tokens)], 1)
    written = _Written(len(rows), rule, uniform_numbers(seeds, rule.max_tokens), logits.device)
    for index in range(rule.max_tokens):
        written.add(index, logits)
        if index + 1 == rule.max_tokens or not written.active.any():
            break
        logits = model(
            input_ids=written.ids[:, index : index + 1],
            attention_mask=attention[:, : encoded.length + index + 1],
            position_ids=(lengths + index).unsqueeze(-1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return written.completions(index + 1)


def _shared_cache(cache: Any, rows: Int[Tensor, " rows"]) -> Any:
    """Repeat the cache of each prompt for its samples."""
    if not all(hasattr(layer, "batch_select_indices") for layer in cache.layers):
        hint = "Its layers keep a state that siblings cannot share; give a model whose layers keep keys and values."
        raise InputError("policy.model", type(cache).__name__, hint)
    cache.batch_select_indices(rows)
    return cache


class _Written:
    """The tokens of all rows so far."""

    def __init__(
        self, rows: int, rule: SamplingRule, uniforms: Float[Tensor, "rows time"], device: torch.device
    ) -> None:
        self.rule, self.uniforms = rule, uniforms.to(device)
        self.ids = torch.zeros(rows, rule.max_tokens, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, rule.max_tokens, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(rows, rule.max_tokens, device=device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(rule.ends, dtype=torch.long, device=device)
        self.recorder = SupportRecorder() if rule.truncation.active else None
        self.written: list[list[int]] = [[] for _ in range(rows)]  # only for stop texts

    def add(self, index: int, logits: Float[Tensor, "rows ids"]) -> None:
        """Sample the token at `index` of every row that has not ended."""
        rule = self.rule
        distribution = truncate(vocabulary_logprobs(logits, rule.vocabulary, rule.temperature), rule.truncation)
        sampled = draw_tokens(distribution, self.uniforms[:, index])
        if self.recorder is not None:
            self.recorder.add(distribution, self.active)
        self.ids[:, index] = torch.where(self.active, sampled, 0)
        self.logprobs[:, index] = torch.where(self.active, gather_logprobs(distribution, sampled), 0.0)
        self.mask[:, index] = self.active
        ended = torch.isin(sampled, self.ends)
        if rule.stops:
            ended |= self._stopped(sampled)
        self.active = self.active & ~ended

    def _stopped(self, sampled: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        stopped = [False] * len(sampled)
        tokens = sampled.tolist()
        for row in self.active.nonzero()[:, 0].tolist():
            self.written[row].append(tokens[row])
            stopped[row] = self.rule.stops.completed(self.written[row])
        return torch.tensor(stopped, device=sampled.device)

    def completions(self, time: int) -> Completions:
        """Return the first `time` tokens, on the CPU."""
        return Completions(
            self.ids[:, :time].cpu(),
            self.mask[:, :time].cpu(),
            self.logprobs[:, :time].cpu(),
            ~self.active.cpu(),
            None if self.recorder is None else self.recorder.support(),
        )
