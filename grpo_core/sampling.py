"""Sample tokens with one uniform number per token, and truncate distributions by top-k, top-p or min-p."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.rollouts.actions import TokenSupport
from grpo_core.seeds import make_generator
from grpo_core.settings import Truncation

TOKENS_PER_LOOK = 8
"""Tokens that a GPU samples before the host looks what they are."""

_BLOCK = 1024


def uniform_numbers(seeds: Sequence[int], count: int) -> Float[Tensor, "samples count"]:
    """Return `count` uniform numbers per sample, which depend on that sample's seed only."""
    return torch.stack([torch.rand(count, generator=make_generator(seed), dtype=torch.float64) for seed in seeds])


def draw_tokens(logprobs: Float[Tensor, "batch vocab"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one id per row by inverting the cumulative distribution, whatever the other rows of the batch.

    Args:
        logprobs: normalised. A row of NaN gives some id, whose log-prob is NaN: the caller detects it there.
        uniforms: in [0, 1), fp64.
    """
    vocabulary = logprobs.shape[-1]
    numbers = uniforms.to(logprobs.device, torch.float64).unsqueeze(-1)
    if vocabulary <= _BLOCK:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, numbers * cumulative[:, -1:]).squeeze(-1)
    # A block first, then the id in it: fp64 sums of every id of a large vocabulary would take longer than its softmax.
    # The last block is what is left over.
    probabilities = logprobs.softmax(-1)
    whole = vocabulary - vocabulary % _BLOCK
    blocks = probabilities[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    ends = torch.cat([blocks, rest], -1).cumsum(-1, dtype=torch.float64)
    thresholds = numbers * ends[:, -1:]
    chosen = _first_above(ends, thresholds)
    begins = torch.nn.functional.pad(ends, (1, 0)).gather(-1, chosen)
    places = chosen * _BLOCK + torch.arange(_BLOCK, device=chosen.device)
    within = probabilities.gather(-1, places.clamp(max=vocabulary - 1)).where(places < vocabulary, 0.0)
    offset = _first_above(within.cumsum(-1, dtype=torch.float64), thresholds - begins)
    return (chosen * _BLOCK + offset).squeeze(-1).clamp(max=vocabulary - 1)


def _first_above(
    cumulative: Float[Tensor, "batch count"], thresholds: Float[Tensor, "batch 1"]
) -> Int[Tensor, "batch 1"]:
    """Return the first place in each row whose sum is above the threshold; thresholds end below the row's total."""
    total = cumulative[:, -1:]
    below = torch.minimum(thresholds, torch.nextafter(total, torch.zeros_like(total)))
    # `right=True` finds no place that adds nothing to the sum. A row of NaN has no such place.
    return torch.searchsorted(cumulative, below, right=True).clamp(max=cumulative.shape[-1] - 1)


def truncate(logprobs: Float[Tensor, "rows vocab"], truncation: Truncation) -> Float[Tensor, "rows vocab"]:
    """Return normalised log-probs over the ids that stay, -inf at the others; at least one stays."""
    if not truncation.truncates:
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
    """Collects the ids that a truncated sampler could choose, a few tokens at a time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ids: list[dict[int, Tensor]] = []
        self._counts: list[Int[Tensor, "batch time"]] = []

    def add(self, possible: Bool[Tensor, "rows time vocab"], rows: Sequence[int]) -> None:
        """Record the next tokens of these rows, ascending; the others, and tokens without possible ids, get none."""
        # A sum over the ids would take eight bytes for each of them on a GPU.
        places = possible.flatten().nonzero()[:, 0].cpu()
        tokens, ids = places // possible.shape[-1], (places % possible.shape[-1]).to(torch.int32)
        counts = tokens.bincount(minlength=len(rows) * possible.shape[1]).view(len(rows), -1)
        everyone = torch.zeros(self._batch, possible.shape[1], dtype=torch.long)
        self._counts.append(everyone.index_put((torch.tensor(rows, dtype=torch.long),), counts))
        self._ids.append(dict(zip(rows, ids.split(counts.sum(-1).tolist()), strict=True)))

    def support(self, time: int) -> TokenSupport:
        """Return the ids of the first `time` tokens, which have all of them, row by row, on the CPU."""
        by_row = [part[row] for row in range(self._batch) for part in self._ids if row in part]
        return TokenSupport(torch.cat(by_row), torch.cat(self._counts, 1)[:, :time])
