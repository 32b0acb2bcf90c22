"""The autoregressive loop: one prefill of the distinct prompts, a shared cache, one random number per token.

A completion ends at an end token, or at the token that completes a stop text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.policies.kv_cache import grow_in_place
from grpo_core.records import SampledTokens, TokenBatch
from grpo_core.sampling import SupportRecorder, draw_tokens, truncate, uniform_numbers
from grpo_core.sampling_settings import Truncation


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends a text, from the generation configuration and the tokenizer, in ascending order."""
    generation = getattr(model, "generation_config", None)
    listed = [
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids = [ids if isinstance(ids, list) else [ids] for ids in listed]
    return tuple(sorted({int(token) for some in ids for token in some if token is not None}))


@dataclass(frozen=True)
class StopTexts:
    """Finds stop texts in a row's tokens.

    Attributes:
        tokenizer: decodes the tokens.
        texts: each ends a completion.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _window(self) -> int:
        # A token is a byte at least; the first of those looked at may be parts of a letter, or lose a leading space.
        return max(len(text.encode()) for text in self.texts) + 4

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these ids completes a stop text; the ids before it contain none.

        Special tokens have no text: the text on both sides of one is joined.
        """
        backwards = islice((token for token in reversed(ids) if token not in self._special), self._window)
        tail = self.decode(list(backwards)[::-1])
        return any(text in tail for text in self.texts)

    def cut(self, text: str) -> str:
        """Return the text before the first stop text in it."""
        places = [place for place in (text.find(stop) for stop in self.texts) if place >= 0]
        return text[: min(places)] if places else text


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is sampled from logits, and when to stop.

    Attributes:
        vocabulary: ids [0, vocabulary) can be sampled.
        temperature: divides the logits.
        truncation: which of these ids can be sampled.
        ends: ids that end a row; they are sampled and trained as any other.
        stops: texts that end a row; None: there are none.
        max_tokens: of a row.
    """

    vocabulary: int
    temperature: float
    truncation: Truncation
    ends: tuple[int, ...]
    stops: StopTexts | None
    max_tokens: int


@torch.no_grad()
def sample_completions(
    model: Any,
    encoded: EncodedPrompts,
    prompts: tuple[str, ...],
    rows: Int[Tensor, " rows"],
    rule: SamplingRule,
    seeds: Sequence[int],
) -> SampledTokens:
    """Sample one completion per row; the loop ends when every row has ended.

    Args:
        encoded: distinct prompts.
        prompts: that each row continues.
        rows: their indices among the encoded ones.
    """
    step = model(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids,
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits = step.past_key_values, step.logits[rows, -1]
    # The samples of a prompt share its prefill.
    cache.batch_select_indices(rows)
    grow_in_place(cache, encoded.length + rule.max_tokens)
    prompt_lengths, attention = encoded.lengths[rows], encoded.attention_mask[rows]
    attention = nn.functional.pad(attention, (0, rule.max_tokens), value=1)
    lengths = prompt_lengths
    written = _Written(len(rows), rule, uniform_numbers(seeds, rule.max_tokens), logits.device)
    for index in range(rule.max_tokens):
        written.add(index, logits)
        kept = written.active.nonzero()[:, 0]
        if index + 1 == rule.max_tokens or not len(kept):
            break
        # Each time copies the cache, so a row does not leave at once when it ends.
        if len(kept) <= 0.75 * len(written.rows):
            written.keep(kept)
            cache.batch_select_indices(kept)
            lengths, attention = lengths[kept], attention[kept]
        logits = model(
            input_ids=written.ids[written.rows, index : index + 1],
            attention_mask=attention[:, : encoded.length + index + 1],
            position_ids=(lengths + index).unsqueeze(-1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return written.sampled(prompts, index + 1, prompt_lengths)


class _Written:
    """The tokens of all rows so far; the model reads those of `rows`, some of which may have ended."""

    def __init__(
        self, rows: int, rule: SamplingRule, uniforms: Float[Tensor, "batch time"], device: torch.device
    ) -> None:
        self.rule, self.uniforms = rule, uniforms.to(device)
        self.ids = torch.zeros(rows, rule.max_tokens, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, rule.max_tokens, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(rows, rule.max_tokens, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(rule.ends, dtype=torch.long, device=device)
        self.recorder = SupportRecorder(rows) if rule.truncation.truncates else None
        self.written: list[list[int]] = [[] for _ in range(rows)]  # only for stop texts

    def add(self, index: int, logits: Float[Tensor, "rows ids"]) -> None:
        """Sample the token at `index` of every row that has not ended."""
        rule, rows = self.rule, self.rows
        distribution = truncate(vocabulary_logprobs(logits, rule.vocabulary, rule.temperature), rule.truncation)
        sampled = draw_tokens(distribution, self.uniforms[rows, index])
        if self.recorder is not None:
            self.recorder.add(distribution[self.active], rows[self.active].tolist())
        self.ids[rows, index] = torch.where(self.active, sampled, 0)
        self.logprobs[rows, index] = torch.where(self.active, gather_logprobs(distribution, sampled), 0.0)
        self.mask[rows, index] = self.active
        ended = torch.isin(sampled, self.ends)
        if rule.stops:
            ended |= self._stopped(rule.stops, sampled)
        self.active = self.active & ~ended
        self.finished[rows] = ~self.active

    def keep(self, places: Int[Tensor, " kept"]) -> None:
        """Leave out all rows but those in these places."""
        self.rows, self.active = self.rows[places], self.active[places]

    def _stopped(self, stops: StopTexts, sampled: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        stopped = [False] * len(sampled)
        tokens, rows = sampled.tolist(), self.rows.tolist()
        for place in self.active.nonzero()[:, 0].tolist():
            own = self.written[rows[place]]
            own.append(tokens[place])
            stopped[place] = stops.completed(own)
        return torch.tensor(stopped, device=sampled.device)

    def sampled(self, prompts: tuple[str, ...], time: int, prompt_lengths: Int[Tensor, " rows"]) -> SampledTokens:
        """Return the first `time` tokens, on the CPU; ids and log-probs after the end of a row are zero."""
        support = None if self.recorder is None else self.recorder.support()
        ids, mask = self.ids[:, :time].cpu(), self.mask[:, :time].cpu()
        tokens = TokenBatch(prompts, ids, mask, self.rule.temperature, support)
        logprobs, finished = self.logprobs[:, :time].cpu(), self.finished.cpu()
        return SampledTokens(tokens, logprobs, finished, self.rule.max_tokens, prompt_lengths.cpu())
