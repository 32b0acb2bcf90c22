"""Batches of sampled actions, tokens and denoising steps, with what is needed to compute their log-probs again."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize, Stream

Sources = tuple[tuple[SourceImage, ...], ...]
"""The source images of each row's prompt, in the order of the prompt."""


def join_sources(parts: Sequence[tuple[int, Sources | None]]) -> Sources | None:
    """Concatenate the sources of several batches, given with their rows; None if no prompt has any."""
    if all(sources is None for _, sources in parts):
        return None
    return tuple(each for rows, sources in parts for each in sources or ((),) * rows)


def pad_to_longest(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [rows, time] tensors of unequal lengths along their rows, with zeros on the right."""
    time = max((part.shape[1] for part in parts), default=0)
    padded = [torch.nn.functional.pad(part, (0, time - part.shape[1])) for part in parts]
    return torch.cat(padded) if padded else torch.zeros(0, 0)


def completion_lengths(loss_mask: Bool[Tensor, "rows time"]) -> Int[Tensor, " rows"]:
    """Return the number of each row's columns up to the last where the mask is True."""
    if not loss_mask.shape[1]:
        return torch.zeros(len(loss_mask), dtype=torch.long)
    return (loss_mask * torch.arange(1, loss_mask.shape[1] + 1)).amax(-1)


R = TypeVar("R", bound="Rows")


class Rows:
    """A frozen record whose tensors, tuples and records have one entry per row; its other fields are of all rows."""

    def select(self: R, rows: Sequence[int]) -> R:
        """Return the rows with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)

        def selected(value: Any) -> Any:
            if isinstance(value, Rows):
                return value.select(rows)
            if isinstance(value, Tensor):
                return value[index]
            # Fields of what a row may lack are empty.
            return tuple(value[row] for row in rows) if isinstance(value, tuple) and value else value

        record: Any = self
        chosen: R = replace(record, **{each.name: selected(getattr(record, each.name)) for each in fields(record)})
        return chosen


@dataclass(frozen=True)
class TokenSupport(Rows):
    """The ids that a truncated sampler could choose at each token; log-probs are over these only.

    `ids` are of all tokens, row by row, ascending within a token; `counts` are zero where the loss mask is False.
    """

    ids: Int[Tensor, " entries"]
    counts: Int[Tensor, "batch time"]

    def __post_init__(self) -> None:
        assert int(self.counts.sum()) == len(self.ids), "every id belongs to a token"

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the ids of each row begin, and where those of the last one end."""
        return [0, *self.counts.sum(-1).cumsum(0).tolist()]

    def select(self, rows: Sequence[int]) -> "TokenSupport":
        """Return the support of the rows with these indices, in this order."""
        parts = [self.ids[self._bounds[row] : self._bounds[row + 1]] for row in rows]
        index = torch.as_tensor(rows, dtype=torch.long)
        return TokenSupport(torch.cat(parts) if parts else self.ids[:0], self.counts[index])


@dataclass(frozen=True)
class TokenBatch(Rows):
    """Sampled tokens with what is needed to compute their log-probs again.

    Attributes:
        token_ids: zero where loss_mask is False.
        loss_mask: True for a token that was sampled by the policy and is trained; False is padding.
        temperature: divided the logits before the softmax, for every row.
        support: the ids that could be sampled under top-k, top-p or min-p; None without truncation.
        sizes: of the rows' images, which decide the places of their tokens; None: texts, or the size in the settings.
        sources: the images in each row's prompt; None: no prompt has any.
    """

    stream: ClassVar[Stream] = "tokens"

    prompts: tuple[str, ...]
    token_ids: Int[Tensor, "batch time"]
    loss_mask: Bool[Tensor, "batch time"]
    temperature: float
    support: TokenSupport | None = None
    sizes: tuple[ImageSize, ...] | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        assert len(self.prompts) == self.token_ids.shape[0], "one prompt per row"
        assert self.sources is None or len(self.sources) == len(self.prompts), "sources for each row"
        assert self.sizes is None or len(self.sizes) == len(self.prompts), "one size per row"
        assert self.token_ids.shape == self.loss_mask.shape, "one mask entry per token"
        assert self.temperature > 0, "temperature is positive"

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def join(cls, batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """Join batches sampled alike (temperature; with a support and sizes, or without) and pad on the right."""
        kinds = {(batch.temperature, batch.support is None, batch.sizes is None) for batch in batches}
        assert len(kinds) == 1, "sampled alike"
        sizes = [size for batch in batches for size in batch.sizes or ()]
        supports = [batch.support for batch in batches if batch.support is not None]
        counts = pad_to_longest([support.counts for support in supports])
        return cls(
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            token_ids=pad_to_longest([batch.token_ids for batch in batches]),
            loss_mask=pad_to_longest([batch.loss_mask for batch in batches]),
            temperature=batches[0].temperature,
            support=TokenSupport(torch.cat([support.ids for support in supports]), counts) if supports else None,
            sizes=tuple(sizes) if sizes else None,
            sources=join_sources([(len(batch), batch.sources) for batch in batches]),
        )

    def repeated(self, times: int) -> "TokenBatch":
        """Return longer rows, with the tokens of each this many times."""
        support = self.support
        if support is not None:
            ids = [support.select([row]).ids.repeat(times) for row in range(len(self))]
            support = TokenSupport(torch.cat(ids), support.counts.repeat(1, times))
        longer = {name: getattr(self, name).repeat(1, times) for name in ("token_ids", "loss_mask")}
        return replace(self, **longer, support=support)

    def trimmed(self) -> "TokenBatch":
        """Remove the trailing columns that are padding in every row; at least one column stays."""
        used = self.loss_mask.any(0).nonzero()
        time = max(1, int(used.max()) + 1 if len(used) else 1)
        support = self.support
        return replace(
            self,
            token_ids=self.token_ids[:, :time],
            loss_mask=self.loss_mask[:, :time],
            support=None if support is None else replace(support, counts=support.counts[:, :time]),
        )


@dataclass(frozen=True)
class DenoisingBatch(Rows):
    """Noisy denoising steps with what is needed to compute their log-probs again; an action is one step.

    Attributes:
        states: latents before the first noisy step and after each of them, one [steps + 1, *latent] per row, in the
            dtype and layout that the pipeline works in; equally many steps in all rows.
        first_steps: index of each row's first noisy step among the denoising steps.
        drafts: the tokens that each row's image is made of; None: images are made of the prompts alone.
        sources: the images in each row's prompt; None: no prompt has any.
    """

    stream: ClassVar[Stream] = "denoising"

    prompts: tuple[str, ...]
    states: tuple[Tensor, ...]
    first_steps: tuple[int, ...]
    sizes: tuple[ImageSize, ...]
    drafts: TokenBatch | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        rows = len(self.prompts)
        assert self.sources is None or len(self.sources) == rows, "sources for each row"
        assert len(self.states) == len(self.first_steps) == len(self.sizes) == rows, "one of each per row"
        assert self.drafts is None or len(self.drafts) == rows, "one draft per row"
        assert len({len(states) for states in self.states}) <= 1, "equally many steps"

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def loss_mask(self) -> Bool[Tensor, "batch steps"]:
        """True everywhere: only noisy steps are stored."""
        steps = len(self.states[0]) - 1 if self.states else 0
        return torch.ones(len(self), steps, dtype=torch.bool)

    @classmethod
    def join(cls, batches: Sequence["DenoisingBatch"]) -> "DenoisingBatch":
        """Join batches that all have drafts, or none."""
        drafts = [batch.drafts for batch in batches if batch.drafts is not None]
        assert len(drafts) in (0, len(batches)), "sampled alike"
        return cls(
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            states=tuple(states for batch in batches for states in batch.states),
            first_steps=tuple(first for batch in batches for first in batch.first_steps),
            sizes=tuple(size for batch in batches for size in batch.sizes),
            drafts=TokenBatch.join(drafts) if drafts else None,
            sources=join_sources([(len(batch), batch.sources) for batch in batches]),
        )

    def at_step(self, step: int) -> "DenoisingBatch":
        """Return one noisy step of every row, as if no other was stored."""
        return replace(
            self,
            states=tuple(states[step : step + 2] for states in self.states),
            first_steps=tuple(first + step for first in self.first_steps),
        )

    def trimmed(self) -> "DenoisingBatch":
        """Return the batch: it has no padding."""
        return self


Actions = TokenBatch | DenoisingBatch
"""The sampled actions of one stream, one row per sample, with what is needed to compute their log-probs again."""
