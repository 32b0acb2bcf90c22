"""The rows of an update without padding: one long completion would make every other row as long.

Values of all rows stand one after another; rows are padded where a microbatch of them is selected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_core.rollouts.actions import DenoisingBatch, Rows, Sources, TokenBatch, TokenSupport, completion_lengths
from grpo_core.rollouts.records import TrainingRows
from grpo_core.rollouts.streams import ImageSize, Stream


@dataclass(frozen=True)
class Ragged:
    """One value per action of rows of unequal lengths: `values` of all rows in their order, `lengths` of each."""

    values: Shaped[Tensor, " entries"]
    lengths: Int[Tensor, " rows"]

    def __post_init__(self) -> None:
        assert int(self.lengths.sum()) == len(self.values), "every value belongs to a row"

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, padded: Shaped[Tensor, "rows time"], lengths: Int[Tensor, " rows"]) -> "Ragged":
        """Return the first values of each padded row, this many."""
        return cls(padded[_filled(lengths, padded.shape[1])], lengths)

    @cached_property
    def _bounds(self) -> Int[Tensor, " bounds"]:
        """Where the values of each row begin, and where those of the last one end."""
        return torch.cat([torch.zeros(1, dtype=torch.long), self.lengths.cumsum(0)])

    def places(self, rows: Sequence[int]) -> Int[Tensor, " chosen"]:
        """Return where the values of the rows with these indices are, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        lengths = self.lengths[index]
        shifts = self._bounds[index] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)

    def take(self, rows: Sequence[int]) -> "Ragged":
        """Return the rows with these indices, in this order, without padding."""
        return Ragged(self.values[self.places(rows)], self.lengths[torch.as_tensor(rows, dtype=torch.long)])

    def select(self, rows: Sequence[int]) -> Shaped[Tensor, "rows time"]:
        """Return the rows with these indices as `padded`; there is a column of zeros if only others have values."""
        return self.take(rows).padded(1 if len(self.values) else 0)

    def padded(self, columns: int = 0) -> Shaped[Tensor, "rows time"]:
        """Return the rows with zeros on the right, as long as the longest, but not shorter than so many columns."""
        filled = _filled(self.lengths, max(int(self.lengths.max()) if len(self) else 0, columns))
        padded = torch.zeros(filled.shape, dtype=self.values.dtype)
        padded[filled] = self.values
        return padded

    def put(self, rows: Sequence[int], padded: Shaped[Tensor, "rows time"]) -> None:
        """Write values of rows as `select` returns them; those beyond the last column stay."""
        lengths = self.lengths[torch.as_tensor(rows, dtype=torch.long)]
        columns = padded.shape[1]
        places = Ragged(self.places(rows), lengths).select(range(len(rows)))[:, :columns]
        filled = _filled(lengths, columns)
        self.values[places[filled[:, : places.shape[1]]]] = padded[filled]

    def sums(self) -> Int[Tensor, " rows"]:
        """Return the sum of each row's values, which are whole numbers or bools."""
        totals = torch.cat([torch.zeros(1, dtype=torch.long), self.values.cumsum(0, dtype=torch.long)])
        return totals[self._bounds].diff()

    @cached_property
    def total(self) -> int:
        """The sum of all values, read once: of values that nobody `put`s others in."""
        return int(self.values.sum())

    def by_action(self, values: Shaped[Tensor, " rows"]) -> Shaped[Tensor, " entries"]:
        """Return a value of each row at each of its actions."""
        return values.repeat_interleave(self.lengths)

    def like(self, values: Shaped[Tensor, " entries"]) -> "Ragged":
        """Return other values of the same rows."""
        return Ragged(values, self.lengths)


def _filled(lengths: Int[Tensor, " rows"], columns: int) -> Bool[Tensor, "rows columns"]:
    return torch.arange(columns) < lengths.unsqueeze(-1)


@dataclass(frozen=True)
class RaggedTokens:
    """A TokenBatch without padding; the ids of `support_ids` are of all tokens, `support_counts` of them each."""

    stream: ClassVar[Stream] = "tokens"

    prompts: tuple[str, ...]
    token_ids: Ragged
    loss_mask: Ragged
    temperature: float
    support_ids: Int[Tensor, " entries"] | None = None
    support_counts: Ragged | None = None
    sizes: tuple[ImageSize, ...] | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.token_ids) == len(self.loss_mask), "one of each per row"
        assert (self.support_ids is None) == (self.support_counts is None), "ids with their counts"

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(cls, tokens: TokenBatch) -> "RaggedTokens":
        """Remove what follows the last token that the loss mask has in each row."""
        lengths, support = completion_lengths(tokens.loss_mask), tokens.support
        return cls(
            prompts=tokens.prompts,
            token_ids=Ragged.of(tokens.token_ids, lengths),
            loss_mask=Ragged.of(tokens.loss_mask, lengths),
            temperature=tokens.temperature,
            support_ids=None if support is None else support.ids,
            support_counts=None if support is None else Ragged.of(support.counts, lengths),
            sizes=tokens.sizes,
            sources=tokens.sources,
        )

    @cached_property
    def _supports(self) -> Ragged | None:
        if self.support_ids is None or self.support_counts is None:
            return None
        return Ragged(self.support_ids, self.support_counts.sums())

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """Return the rows with these indices, in this order, padded to the longest of them."""
        support = None
        if self._supports is not None and self.support_counts is not None:
            support = TokenSupport(self._supports.take(rows).values, self.support_counts.select(rows).long())
        return TokenBatch(
            prompts=tuple(self.prompts[row] for row in rows),
            token_ids=self.token_ids.select(rows).long(),
            loss_mask=self.loss_mask.select(rows),
            temperature=self.temperature,
            support=support,
            sizes=None if self.sizes is None else tuple(self.sizes[row] for row in rows),
            sources=None if self.sources is None else tuple(self.sources[row] for row in rows),
        )


@dataclass(frozen=True, kw_only=True)
class RaggedActions:
    """SampledActions without padding; prompt lengths as of TrainingRows."""

    actions: RaggedTokens | DenoisingBatch
    rollout_logprobs: Ragged
    finished: Bool[Tensor, " batch"]
    max_length: int
    prompt_lengths: Int[Tensor, " batch"] | None = None


@dataclass(frozen=True, kw_only=True)
class RaggedRows(RaggedActions):
    """All rows of an update: TrainingRows without padding, of which microbatches are selected."""

    sample_ids: tuple[str, ...]
    advantages: Float[Tensor, " batch"]
    on_policy: Bool[Tensor, " batch"]
    old_logprobs: Ragged | None = None
    old_entropy: Ragged | None = None
    ref_logprobs: Ragged | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    @classmethod
    def of(cls, rows: TrainingRows) -> "RaggedRows":
        """Remove what follows the last action that the loss mask has in each row."""
        lengths = completion_lengths(rows.actions.loss_mask)

        def ragged(name: str) -> Any:
            value = getattr(rows, name)
            return Ragged.of(value, lengths) if isinstance(value, Tensor) and value.ndim > 1 else value

        actions = RaggedTokens.of(rows.actions) if isinstance(rows.actions, TokenBatch) else rows.actions
        names = [each.name for each in fields(cls) if each.name != "actions"]
        return cls(actions=actions, **{name: ragged(name) for name in names})

    @cached_property
    def loss_mask(self) -> Ragged:
        """True for a sampled action."""
        mask = self.actions.loss_mask
        return mask if isinstance(mask, Ragged) else Ragged.of(mask, completion_lengths(mask))

    @cached_property
    def _counts(self) -> Int[Tensor, " rows"]:
        return self.loss_mask.sums()

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the number of actions of these rows."""
        found: list[int] = self._counts[torch.as_tensor(indices, dtype=torch.long)].tolist()
        return found

    def select(self, rows: Sequence[int]) -> TrainingRows:
        """Return the rows with these indices, in this order, padded to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.long)

        def selected(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[index]
            if isinstance(value, tuple):
                return tuple(value[row] for row in rows)
            return value.select(rows) if isinstance(value, Rows | Ragged | RaggedTokens) else value

        return TrainingRows(**{each.name: selected(getattr(self, each.name)) for each in fields(self)})
