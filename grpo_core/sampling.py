"""Sample tokens with one uniform number per token, and truncate distributions by top-k, top-p or min-p."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.records import TokenSupport
from grpo_core.sampling_settings import Truncation
from grpo_core.seeds import make_generator


def uniform_numbers(seeds: Sequence[int], count: int) -> Float[Tensor, "samples count"]:
    """Return `count` uniform numbers per sample, which depend on that sample's seed only."""
    return torch.stack([torch.rand(count, generator=make_generator(seed), dtype=torch.float64) for seed in seeds])


def draw_tokens(logprobs: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one id per row by inverting the cumulative distribution.

    Each row's id depends only on its distribution and its uniform number, so a sample does not change
    with the other rows of the batch.

    Args:
        logprobs: normalised log-probs. A row of NaN gives id 0, whose log-prob is NaN: the caller detects it there.
        uniforms: in [0, 1), fp64.
    """
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(-1)
    thresholds = uniforms.to(cumulative.device, torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    # `right=True` skips ids of probability zero at a threshold of exactly zero.
    sampled = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    last_possible = (probabilities > 0).long().mul(torch.arange(logprobs.shape[-1], device=sampled.device))
    return torch.minimum(sampled, last_possible.amax(-1))


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

    def __init__(self) -> None:
        """Start without a record."""
        self._ids: list[tuple[Tensor, ...]] = []
        self._counts: list[Tensor] = []

    def add(self, logprobs: Float[Tensor, "batch vocab"], active: Bool[Tensor, " batch"] | None = None) -> None:
        """Record one token of every row.

        Args:
            active: rows that have this token; the others get no ids. None: all rows.
        """
        # NaN stays: such a distribution was not cut, and its log-prob is refused by name later.
        possible = logprobs != -torch.inf
        if active is not None:
            possible = possible & active.unsqueeze(-1)
        counts = possible.sum(-1).cpu()
        self._counts.append(counts)
        self._ids.append(possible.nonzero()[:, 1].to("cpu", torch.int32).split(counts.tolist()))

    def support(self) -> TokenSupport:
        """Return the recorded ids, row by row, on the CPU; requires at least one recorded token."""
        by_row = [ids for row in zip(*self._ids, strict=True) for ids in row]
        return TokenSupport(torch.cat(by_row), torch.stack(self._counts, 1))
