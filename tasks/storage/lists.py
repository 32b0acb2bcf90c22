"""Columns of lists of numbers: rows of unequal lengths, in memory with or without padding."""

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from grpo_core.rollouts.actions import completion_lengths
from grpo_core.rollouts.ragged import Ragged


def unpadded(values: Shaped[Tensor, "rows time"], mask: Bool[Tensor, "rows time"]) -> pa.ListArray:
    """Return each row up to its last column where the mask is True."""
    rows = Ragged.of(values, completion_lengths(mask))
    return lists_of(rows.values, rows.lengths)


def lists_of(values: Shaped[Tensor, " entries"], lengths: Int[Tensor, " rows"]) -> pa.ListArray:
    """Return one list per row from the values of all rows, one after another."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return pa.ListArray.from_arrays(pa.array(offsets.int().numpy()), pa.array(values.numpy()))


def padded(lists: pl.Series) -> Shaped[Tensor, "rows longest"]:
    """Return a column of lists of unequal length as one tensor, with zeros on the right."""
    return ragged(lists).padded()


def ragged(lists: pl.Series) -> Ragged:
    """Return a column of lists of unequal length without padding."""
    # One copy of the Arrow buffer, no Python objects.
    values = torch.from_numpy(np.array(lists.to_arrow().flatten().to_numpy(zero_copy_only=False)))
    return Ragged(values, lists.list.len().cast(pl.Int64).to_torch())
