"""How often which previous and later reward met: what a scatter of any number of samples needs."""

from dataclasses import dataclass

import polars as pl

BINS = 40


@dataclass(frozen=True)
class Axis:
    """Equal bins from `low` to `high`; both are the same where all values are."""

    low: float
    high: float

    def edge(self, index: int) -> float:
        """Lower edge of a bin; that of the bin after the last is `high`."""
        return self.low + (self.high - self.low) * index / BINS


@dataclass(frozen=True)
class JointCounts:
    """A two-dimensional histogram.

    Attributes:
        before: bins of the previous reward.
        after: bins of the later one.
        cells: bin of `before`, bin of `after`, and samples in both; cells without any are left out.
    """

    before: Axis
    after: Axis
    cells: tuple[tuple[int, int, int], ...]

    def marginal(self, side: int) -> tuple[int, ...]:
        """Samples a bin of one side; 0 is the previous, 1 the later."""
        counts = [0] * BINS
        for cell in self.cells:
            counts[cell[side]] += cell[2]
        return tuple(counts)


def joint_counts(frame: pl.DataFrame, before: str, after: str) -> JointCounts:
    """Count the samples that have both of two settled columns; at least one must."""
    pairs = frame.select(before=before, after=after).drop_nulls()
    previous, later = (_axis(pairs[side]) for side in ("before", "after"))
    binned = pairs.select(_bin("before", previous), _bin("after", later))
    cells = binned.group_by("before", "after").len().sort("before", "after").rows()
    return JointCounts(previous, later, tuple(cells))


def _axis(values: pl.Series) -> Axis:
    low, high = values.min(), values.max()
    assert isinstance(low, float)
    assert isinstance(high, float)
    return Axis(low, high)


def _bin(column: str, axis: Axis) -> pl.Expr:
    if axis.high == axis.low:
        return (pl.col(column) * 0).cast(pl.Int64)
    share = (pl.col(column) - axis.low) / (axis.high - axis.low)
    return (share * BINS).floor().cast(pl.Int64).clip(0, BINS - 1)
