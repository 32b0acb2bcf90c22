"""The interface of an engine, and completions that it returned as sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_core.actions import Sources, TokenBatch, TokenSupport
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.policies.causal_lm.sampling_scoring import SamplingRule
from grpo_core.records import SampledTokens


class Engine(Protocol):
    """Samples completions; `sample_completions` of a model is one that needs no other engine."""

    def __call__(
        self,
        encoded: EncodedPrompts,
        prompts: tuple[str, ...],
        rows: Int[Tensor, " rows"],
        rule: SamplingRule,
        seeds: Sequence[int],
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample one completion per row, each from its own seed, by the rule.

        Args:
            encoded: distinct prompts.
            prompts: that each row continues.
            rows: their indices among the encoded ones.
            rule: vocabulary, temperature, truncation and ends.
            seeds: one per row.
            sources: the source images of each row's prompt; None: no prompt has any.
        """


@dataclass(frozen=True)
class Completion:
    """What an engine returned for a row.

    Attributes:
        token_ids: with the one that ended it.
        logprobs: of each, in the distribution that it was sampled from.
        support: the ids that each could have been, ascending; None without truncation.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    support: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one log-prob per token"


def prompt_ids_of(encoded: EncodedPrompts) -> list[list[int]]:
    """Return the ids of each prompt without its padding."""
    pairs = zip(encoded.input_ids, encoded.attention_mask.bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def end_of(rule: SamplingRule, token_ids: Sequence[int]) -> int | None:
    """Return how many of these ids a completion has by the rule, with the one that ends it; None: it goes on."""
    ends = set(rule.ends)
    for count, token in enumerate(token_ids, start=1):
        if token in ends or (rule.stops and rule.stops.completed(token_ids[:count])):
            return count
    return None


def as_sampled_tokens(
    completions: Sequence[Completion],
    prompts: tuple[str, ...],
    prompt_lengths: Int[Tensor, " rows"],
    rule: SamplingRule,
    sources: Sources | None,
) -> SampledTokens:
    """Return completions as the policy's own sampling does: cut where the rule ends them, padded on the right."""
    lengths = [end_of(rule, each.token_ids) for each in completions]
    kept = [each.token_ids[:length] for each, length in zip(completions, lengths, strict=True)]
    time = max(len(ids) for ids in kept)
    padded = [(0,) * (time - len(ids)) for ids in kept]
    mask = torch.tensor([[True] * len(ids) + [False] * len(fill) for ids, fill in zip(kept, padded, strict=True)])
    ids = torch.tensor([[*row, *fill] for row, fill in zip(kept, padded, strict=True)])
    logprobs = torch.tensor(
        [[*each.logprobs[: len(row)], *fill] for each, row, fill in zip(completions, kept, padded, strict=True)],
        dtype=torch.float32,
    )
    support = _support(completions, [len(row) for row in kept], time) if rule.truncation.truncates else None
    tokens = TokenBatch(prompts, ids, mask, rule.temperature, support, sources=sources)
    finished = torch.tensor([length is not None for length in lengths])
    return SampledTokens(tokens, logprobs, finished, rule.max_tokens, prompt_lengths.cpu())


def _support(completions: Sequence[Completion], lengths: Sequence[int], time: int) -> TokenSupport:
    rows = [(each.support or ())[:length] for each, length in zip(completions, lengths, strict=True)]
    counts = [[len(ids) for ids in row] + [0] * (time - len(row)) for row in rows]
    entries = [token for row in rows for ids in row for token in ids]
    return TokenSupport(torch.tensor(entries, dtype=torch.int32), torch.tensor(counts, dtype=torch.long))
