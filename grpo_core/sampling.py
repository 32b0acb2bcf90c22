"""Sample tokens with one uniform number per token, and truncate distributions by top-k, top-p or min-p."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.records import TokenSupport
from grpo_core.seeds import make_generator

_BLOCK = 1024


def uniform_numbers(seeds: Sequence[int], count: int) -> Float[Tensor, "samples count"]:
    """Return `count` uniform numbers per sample, which depend on that sample's seed only."""
    return torch.stack([torch.rand(count, generator=make_generator(seed), dtype=torch.float64) for seed in seeds])


def draw_tokens(logprobs: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one id per row by inverting the cumulative distribution.

    Each row's id depends only on its distribution and its uniform number, so a sample does not change
    with the other rows of the batch.

    Args:
        logprobs: normalised log-probs. A row of NaN gives some id, whose log-prob is NaN: the caller detects it there.
        uniforms: in [0, 1), fp64.
    """
    rows, vocabulary = logprobs.shape
    numbers = uniforms.to(logprobs.device, torch.float64).unsqueeze(-1)
    if vocabulary <= _BLOCK:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, numbers * cumulative[:, -1:]).squeeze(-1)
    # A block first, then the id in it: fp64 sums of every id of a large vocabulary would take longer than its softmax.
    filled = torch.nn.functional.pad(logprobs, (0, -vocabulary % _BLOCK), value=-torch.inf)
    blocks = filled.exp().unflatten(-1, (-1, _BLOCK))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    thresholds = numbers * ends[:, -1:]
    chosen = _first_above(ends, thresholds)
    begins = torch.nn.functional.pad(ends, (1, 0)).gather(-1, chosen)
    within = blocks[torch.arange(rows, device=chosen.device), chosen.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    ids = chosen * _BLOCK + _first_above(within, thresholds - begins)
    return ids.squeeze(-1).clamp(max=vocabulary - 1)


def _first_above(
    cumulative: Float[Tensor, "batch count"], thresholds: Float[Tensor, "batch 1"]
) -> Int[Tensor, "batch 1"]:
    """Return the first place in each row whose sum is above the threshold; thresholds end below the row's total."""
    total = cumulative[:, -1:]
    below = torch.minimum(thresholds, torch.nextafter(total, torch.zeros_like(total)))
    # `right=True` finds no place that adds nothing to the sum. A row of NaN has no such place.
    return torch.searchsorted(cumulative, below, right=True).clamp(max=cumulative.shape[-1] - 1)


@dataclass(frozen=True)
class Truncation:
    """Which ids of a distribution can be sampled; the cuts apply in this order, each to the ids that are left.

    Attributes:
        top_k: the k likeliest ids, and those as likely as the least likely of them; 0 cuts nothing.
        top_p: the fewest likeliest ids whose probabilities add up to at least this (Holtzman et al., 2020,
            arXiv:1904.09751); 1 cuts nothing.
        min_p: ids at least this times as probable as the likeliest (Nguyen et al., 2024, arXiv:2407.01082); 0 cuts
            nothing.

    Raises:
        InputError: a value outside its range.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise InputError("rollout.top_k", self.top_k, "Give a number of ids, or 0 for all of them.")
        if not 0 < self.top_p <= 1:
            raise InputError("rollout.top_p", self.top_p, "Give a probability above 0; 1 keeps every id.")
        if not 0 <= self.min_p < 1:
            raise InputError("rollout.min_p", self.min_p, "Give a fraction from 0 to below 1; 0 keeps every id.")

    @property
    def active(self) -> bool:
        """Whether anything is cut."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class TokenSamplingSettings:
    """How tokens are sampled, whatever they are rendered to.

    Attributes:
        temperature: of the token distribution.
        top_k: only the k likeliest ids can be sampled; 0: off.
        top_p: only the likeliest ids that together have this probability can be sampled; 1: off.
        min_p: only ids at least this times as probable as the likeliest can be sampled; 0: off.
    """

    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def truncation(self) -> Truncation:
        """Which ids can be sampled.

        Raises:
            InputError: a value outside its range.
        """
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


def truncate(logprobs: Float[Tensor, "rows vocab"], truncation: Truncation) -> Float[Tensor, "rows vocab"]:
    """Return normalised log-probs over the ids that stay, -inf at the others; at least one stays."""
    if not truncation.active:
        return logprobs
    kept = logprobs
    if truncation.top_k:
        last = kept.topk(min(truncation.top_k, kept.shape[-1])).values[:, -1:]
        kept = kept.masked_fill(kept < last, -torch.inf)
    if truncation.top_p < 1:
        kept = kept.masked_fill(_outside_nucleus(kept, truncation.top_p), -torch.inf)
    if truncation.min_p:
        probabilities = kept.softmax(-1)
        kept = kept.masked_fill(probabilities < truncation.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return kept.log_softmax(-1)


def _outside_nucleus(scores: Float[Tensor, "rows vocab"], top_p: float) -> Bool[Tensor, "rows vocab"]:
    """Return the ids that, together with all less likely ones, have a probability of at most 1 - top_p."""
    ascending, order = scores.sort(dim=-1, stable=True)
    tail = ascending.softmax(-1).cumsum(-1)
    outside = tail <= 1 - top_p
    outside[:, -1] = False
    return torch.zeros_like(outside).scatter(-1, order, outside)


class SupportRecorder:
    """Collects, token by token, the ids that a truncated sampler could choose."""

    def __init__(self, batch: int) -> None:
        """Start without a record, for this many rows."""
        self._batch = batch
        self._ids: list[dict[int, Tensor]] = []
        self._counts: list[Tensor] = []

    def add(self, logprobs: Float[Tensor, "rows vocab"], rows: Sequence[int]) -> None:
        """Record one token of these rows; the others get no ids.

        Args:
            rows: the row of each distribution in the batch, ascending.
        """
        # NaN stays: such a distribution was not cut, and its log-prob is refused by name later.
        possible = logprobs != -torch.inf
        counts, index = possible.sum(-1).cpu(), torch.tensor(rows, dtype=torch.long)
        self._counts.append(torch.zeros(self._batch, dtype=torch.long).index_put((index,), counts))
        ids = possible.nonzero()[:, 1].to("cpu", torch.int32).split(counts.tolist())
        self._ids.append(dict(zip(rows, ids, strict=True)))

    def support(self) -> TokenSupport:
        """Return the recorded ids, row by row, on the CPU; requires at least one recorded token."""
        by_row = [step[row] for row in range(self._batch) for step in self._ids if row in step]
        return TokenSupport(torch.cat(by_row), torch.stack(self._counts, 1))
