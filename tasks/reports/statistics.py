"""Statistics of rewards in groups: columns checked and rounded, spread, rank correlation, quantiles, histograms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

GROUP = ("run", "iteration", "group_id")
"""Columns that identify a group, since two runs use the same group ids."""

SAMPLE = ("run", "sample_id")
"""Columns that identify a sample."""

DIGITS = 12
"""Decimal digits of a column's largest value that do not depend on the order of a sum."""

QUANTILES = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
BINS = 40


def require_columns(frame: pl.DataFrame, columns: Iterable[str], what: str) -> None:
    """Check that a frame has these columns.

    Raises:
        ValueError: some are missing; all of them are named.
    """
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{what} lack the columns {', '.join(missing)}; they have {', '.join(frame.columns)}")


def require_unique(frame: pl.DataFrame, columns: Sequence[str], what: str) -> None:
    """Check that no two rows have the same values in these columns.

    Raises:
        ValueError: two rows do; one such combination is named.
    """
    twice = frame.filter(frame.select(columns).is_duplicated())
    if twice.height:
        values = zip(columns, twice.select(columns).row(0), strict=True)
        raise ValueError(f"{what} have {', '.join(f'{column} {value!r}' for column, value in values)} more than once")


def finite(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Cast these columns to fp64, null where they are not finite."""
    numbers = frame.with_columns(pl.col(columns).cast(pl.Float64))
    return numbers.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in columns)


def settled(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Cast these columns to fp64 and round them to 12 digits of the largest value, null where they are not finite.

    Ranks, ties and constant groups would otherwise depend on the last bit of a weighted sum.
    """
    numbers = finite(frame, columns)
    return numbers.with_columns(pl.col(column).round(_decimals(numbers[column])) + 0.0 for column in columns)


def _decimals(column: pl.Series) -> int:
    largest = number_or_none(column.abs().max())
    return 0 if not largest else min(300, max(0, DIGITS - math.ceil(math.log10(largest))))


def with_groups(frame: pl.DataFrame) -> pl.DataFrame:
    """Number the groups in the column `group`."""
    return frame.with_columns(pl.struct(GROUP).rank("dense").alias("group"))


def number_or_none(value: object) -> float | None:
    """Convert a statistic to a Python number; None where it is not defined."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True)
class Spread:
    """Spread of one reward over samples in groups.

    Attributes:
        samples: number of samples.
        values: samples that have a value.
        null_share: share of samples without one; None without samples.
        mean: over values; None without any.
        std: over values, Bessel-corrected; None with fewer than two.
        within_groups: mean over groups with at least two values of their Bessel-corrected standard deviation.
        groups: groups with a value.
        groups_without_spread: share of these with fewer than two values or equal ones; nothing is learned from them.
    """

    samples: int
    values: int
    null_share: float | None
    mean: float | None
    std: float | None
    within_groups: float | None
    groups: int
    groups_without_spread: float | None


def spread_of(frame: pl.DataFrame, column: str) -> Spread:
    """Summarize a settled column over the groups that the column `group` numbers."""
    values = frame.select("group", value=column).drop_nulls("value")
    flat = pl.col("value").min() == pl.col("value").max()
    # Equal values may have a deviation other than zero in the last bit.
    std = pl.when(flat & (pl.len() > 1)).then(0.0).otherwise(pl.col("value").std())
    groups = values.group_by("group", maintain_order=True).agg(flat.alias("flat"), std.alias("std"))
    return Spread(
        samples=frame.height,
        values=values.height,
        null_share=(frame.height - values.height) / frame.height if frame.height else None,
        mean=number_or_none(values["value"].mean()),
        std=number_or_none(values.select(std).item()) if values.height else None,
        within_groups=number_or_none(groups["std"].mean()),
        groups=groups.height,
        groups_without_spread=number_or_none(groups["flat"].mean()),
    )


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's rank correlation of two columns, equal values sharing the mean of their ranks.

    Attributes:
        pairs: samples that have both values.
        overall: over all of them; None where one side is constant, or with fewer than two.
        within_groups: mean over the groups in which it is defined; None where there is none.
        groups: groups in which it is defined.
        groups_undefined: groups with a pair in which one side is constant, or with a single pair.
    """

    pairs: int
    overall: float | None
    within_groups: float | None
    groups: int
    groups_undefined: int


def rank_agreement(frame: pl.DataFrame, first: str, second: str) -> RankAgreement:
    """Correlate the ranks of two settled columns, over all samples and in the groups that `group` numbers."""
    pairs = frame.select("group", first=first, second=second).drop_nulls(["first", "second"])
    varied = (pl.col("first").min() < pl.col("first").max()) & (pl.col("second").min() < pl.col("second").max())
    rho = pl.when(varied).then(pl.corr("first", "second", method="spearman").clip(-1.0, 1.0)).alias("rho")
    groups = pairs.group_by("group", maintain_order=True).agg(rho)["rho"]
    return RankAgreement(
        pairs=pairs.height,
        overall=number_or_none(pairs.select(rho).item()) if pairs.height else None,
        within_groups=number_or_none(groups.mean()),
        groups=len(groups) - groups.null_count(),
        groups_undefined=groups.null_count(),
    )


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of values, interpolated linearly."""

    minimum: float
    p01: float
    p05: float
    p25: float
    median: float
    p75: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class Histogram:
    """Counts of values in equal bins.

    Attributes:
        low: lower edge of the first bin.
        high: upper edge of the last; it belongs to that bin.
        counts: values per bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]


def quantiles_of(values: pl.Series) -> Quantiles | None:
    """Compute the quantiles of finite values, nulls left out; None without any."""
    shares = {"minimum": 0.0, **QUANTILES, "maximum": 1.0}
    found = {name: number_or_none(values.quantile(share, "linear")) for name, share in shares.items()}
    known = {name: value for name, value in found.items() if value is not None}
    return Quantiles(**known) if known else None


def histogram_of(values: pl.Series) -> Histogram | None:
    """Count finite values in bins from 0 to 1 where all lie there, else from the least to the largest; None without."""
    known = values.drop_nulls().to_numpy()
    if not known.size:
        return None
    low, high = (0.0, 1.0) if known.min() >= 0 and known.max() <= 1 else (float(known.min()), float(known.max()))
    if low == high:
        low, high = low - 0.5, high + 0.5
    # numpy.histogram rounds its edges, and 0.3 would not be in the bin that begins there.
    bins = np.floor((known - low) / (high - low) * BINS).astype(int).clip(0, BINS - 1)
    return Histogram(low, high, tuple(np.bincount(bins, minlength=BINS).tolist()))
