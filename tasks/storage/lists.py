"""Columns of lists of numbers: rows of a padded tensor without their padding, and back."""

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


def unpadded(values: Shaped[Tensor, "rows time"], mask: Bool[Tensor, "rows time"]) -> pa.ListArray:
    """Return each row up to its last column where the mask is True."""
    places = torch.arange(1, mask.shape[1] + 1)
    # There may be no column.
    lengths = (mask * places).amax(-1) if mask.shape[1] else torch.zeros(len(mask), dtype=torch.long)
    return lists_of(values[places <= lengths.unsqueeze(-1)], lengths)


def lists_of(values: Shaped[Tensor, " entries"], lengths: Int[Tensor, " rows"]) -> pa.ListArray:
    """Return one list per row from the values of all rows, one after another."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return pa.ListArray.from_arrays(pa.array(offsets.int().numpy()), pa.array(values.numpy()))


def padded(lists: pl.Series) -> Shaped[Tensor, "rows longest"]:
    """Return a column of lists of unequal length as one tensor, with zeros on the right."""
    # One copy of the Arrow buffer, no Python objects.
    values = torch.from_numpy(np.array(lists.to_arrow().flatten().to_numpy(zero_copy_only=False)))
    lengths = lists.list.len().cast(pl.Int64).to_torch()
    filled = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths.unsqueeze(-1)
    rows = torch.zeros(filled.shape, dtype=values.dtype)
    rows[filled] = values
    return rows
