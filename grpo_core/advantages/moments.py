"""Mean and standard deviation of rows with gaps."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUNDING = 1e-12
"""Relative to the values: sums of the same rewards in another order differ by less, in fp64."""


@dataclass(frozen=True)
class Moments:
    """Statistics of each row over its counted values.

    Attributes:
        counts: how many values count.
        means: zero for a row without counted values.
        stds: Bessel-corrected; exactly zero for a constant row.
        centred: value - mean; exactly zero in a constant row and where a value does not count.
        constant: fewer than two values count, or they do not differ beyond rounding.
    """

    counts: Int[Tensor, " rows"]
    means: Float[Tensor, " rows"]
    stds: Float[Tensor, " rows"]
    centred: Float[Tensor, "rows columns"]
    constant: Bool[Tensor, " rows"]


def moments_of(
    values: Float[Tensor, "rows columns"],
    counted: Bool[Tensor, "rows columns"],
    *,
    magnitudes: Float[Tensor, "rows columns"] | None = None,
) -> Moments:
    """Compute the moments of each row in fp64; values where `counted` is False are ignored.

    Args:
        magnitudes: for values that are sums: of the magnitudes of what was added, which bounds the rounding where it
            cancels; by default |value|.
    """
    zeroed = torch.where(counted, values, 0.0).double()
    counts = counted.sum(-1)
    means = zeroed.sum(-1) / counts.clamp(min=1)
    highest = torch.where(counted, zeroed, -torch.inf).amax(-1)
    lowest = torch.where(counted, zeroed, torch.inf).amin(-1)
    largest = torch.where(counted, zeroed.abs() if magnitudes is None else magnitudes, 0.0).amax(-1)
    # Not by the deviations: the mean of equal numbers can differ from them in the last bit.
    constant = (counts < 2) | (highest - lowest <= ROUNDING * largest)
    centred = torch.where(counted & ~constant.unsqueeze(-1), zeroed - means.unsqueeze(-1), 0.0)
    stds = (centred.square().sum(-1) / (counts - 1).clamp(min=1)).sqrt()
    return Moments(counts, means, stds, centred, constant)
