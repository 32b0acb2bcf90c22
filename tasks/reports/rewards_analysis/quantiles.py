"""Where values lie, and how they are spread over bins."""

from dataclasses import dataclass

import polars as pl

from tasks.reports.sample_frames import number_or_none

SHARES = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
BINS = 40


@dataclass(frozen=True)
class Quantiles:
    """Values from the least to the most, between two of them in proportion."""

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
    """Values in equal bins.

    Attributes:
        low: lower edge of the first bin.
        high: upper edge of the last; it lies in that bin.
        counts: values a bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]


def quantiles_of(values: pl.Series) -> Quantiles | None:
    """Quantiles of finite values; None without any. Nulls do not count."""
    least, most = number_or_none(values.min()), number_or_none(values.max())
    if least is None or most is None:
        return None
    between = {name: number_or_none(values.quantile(share, "linear")) for name, share in SHARES.items()}
    return Quantiles(minimum=least, maximum=most, **{name: least if v is None else v for name, v in between.items()})


def histogram_of(values: pl.Series) -> Histogram | None:
    """Counts from 0 to 1 where all finite values lie there, else from the least to the most; None without values."""
    least, most = number_or_none(values.min()), number_or_none(values.max())
    if least is None or most is None:
        return None
    low, high = (0.0, 1.0) if least >= 0 and most <= 1 else (least, most)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = ((values.drop_nulls() - low) / (high - low) * BINS).floor().cast(pl.Int64).clip(0, BINS - 1)
    counts = [0] * BINS
    for index, count in bins.value_counts().rows():
        counts[index] = count
    return Histogram(low, high, tuple(counts))
