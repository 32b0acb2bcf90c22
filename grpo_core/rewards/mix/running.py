"""Mean and spread of each reward over every call so far, in a few numbers that a run can store."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

ROUNDING = 1e-12
"""Relative to the mean: what equal values differ by after their deviations are added up in fp64 is below it."""


@dataclass(frozen=True)
class RunningMoments:
    """Moments of the scaled values, one entry per reward; plain numbers, exact as JSON.

    However the values are cut into calls, the merged moments are the same within rounding.

    Attributes:
        counts: how many values were known.
        means: 0 where none was.
        squares: sum of the squared deviations from the mean.
    """

    counts: tuple[int, ...]
    means: tuple[float, ...]
    squares: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.counts), len(self.means), len(self.squares)}
        assert len(sizes) == 1, f"one entry per reward in every field, got {sizes}"

    @classmethod
    def empty(cls, rewards: int) -> "RunningMoments":
        """Return the moments of no values."""
        return cls((0,) * rewards, (0.0,) * rewards, (0.0,) * rewards)

    @classmethod
    def of(cls, values: Float[Tensor, "... rewards"]) -> "RunningMoments":
        """Return the moments of these values, in fp64; NaN values do not count."""
        rows = values.double().reshape(-1, values.shape[-1])
        known = ~rows.isnan()
        counts = known.sum(0)
        means = torch.where(known, rows, 0.0).sum(0) / counts.clamp(min=1)
        squares = torch.where(known, rows - means, 0.0).square().sum(0)
        return cls(tuple(counts.tolist()), tuple(means.tolist()), tuple(squares.tolist()))

    def merged(self, other: "RunningMoments") -> "RunningMoments":
        """Of the values of both.

        Chan, Golub and LeVeque, 1979, Updating formulae and a pairwise algorithm for computing sample variances
        (STAN-CS-79-773), section 2, written with means in place of sums.

        Raises:
            ValueError: they are of different numbers of rewards.
        """
        if len(self.counts) != len(other.counts):
            raise ValueError(f"moments of {len(self.counts)} rewards and of {len(other.counts)} cannot be merged")
        pairs = zip(self._entries(), other._entries(), strict=True)
        merged = [_merged(one, another) for one, another in pairs]
        return RunningMoments(
            tuple(count for count, _, _ in merged),
            tuple(mean for _, mean, _ in merged),
            tuple(square for _, _, square in merged),
        )

    @property
    def stds(self) -> tuple[float, ...]:
        """Bessel-corrected; exactly 0 with fewer than two values, and where they do not differ beyond rounding."""
        return tuple(_std(count, mean, square) for count, mean, square in self._entries())

    def _entries(self) -> list[tuple[int, float, float]]:
        return list(zip(self.counts, self.means, self.squares, strict=True))


def _merged(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[int, float, float]:
    (count, mean, square), (other_count, other_mean, other_square) = one, other
    if count == 0 or other_count == 0:
        return other if count == 0 else one
    total = count + other_count
    apart = other_mean - mean
    share = other_count / total
    return total, mean + apart * share, square + other_square + apart * apart * count * share


def _std(count: int, mean: float, square: float) -> float:
    if count < 2:
        return 0.0
    std = math.sqrt(square / (count - 1))
    return std if std > ROUNDING * abs(mean) else 0.0
