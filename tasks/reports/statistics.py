"""Statistics of rewards in groups, as plain dictionaries: spread, rank correlation, quantiles, histograms.

A statistic that is not defined is None: JSON has no NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

GROUP = ("run", "iteration", "group_id")  # columns that identify a group, since two runs use the same group ids
SAMPLE = ("run", "sample_id")  # columns that identify a sample
DIGITS = 12  # decimal digits of a column's largest value that do not depend on the order of a sum

QUANTILES = {
    "minimum": 0.0,
    "p01": 0.01,
    "p05": 0.05,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p95": 0.95,
    "p99": 0.99,
    "maximum": 1.0,
}
BINS = 40

Statistics = dict[str, Any]

Histogram = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # counts, and the edges of the bins: one more


def finite(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Cast these columns to fp64, null where they are not finite."""
    numbers = frame.with_columns(pl.col(columns).cast(pl.Float64))
    return numbers.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in columns)


def rounded(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Cast these columns to fp64, null where not finite, rounded to 12 digits: ranks must not hang on a last bit."""
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


def spread_of(frame: pl.DataFrame, column: str) -> Statistics:
    """Summarize a rounded column over the groups that the column `group` numbers."""
    values = frame.select("group", value=column).drop_nulls("value")
    flat = pl.col("value").min() == pl.col("value").max()
    # Equal values may have a deviation other than zero in the last bit.
    std = pl.when(flat & (pl.len() > 1)).then(0.0).otherwise(pl.col("value").std())
    groups = values.group_by("group", maintain_order=True).agg(flat.alias("flat"), std.alias("std"))
    return {
        "samples": frame.height,
        "values": values.height,  # samples that have one
        "null_share": (frame.height - values.height) / frame.height if frame.height else None,
        "mean": number_or_none(values["value"].mean()),
        "std": number_or_none(values.select(std).item()) if values.height else None,  # Bessel-corrected
        "within_groups": number_or_none(groups["std"].mean()),  # over groups with at least two values
        "groups": groups.height,  # with a value
        # Share of these with fewer than two values or equal ones; nothing is learned from them.
        "groups_without_spread": number_or_none(groups["flat"].mean()),
    }


def rank_agreement(frame: pl.DataFrame, first: str, second: str) -> Statistics:
    """Compute Spearman's rank correlation of two rounded columns, equal values sharing the mean of their ranks."""
    pairs = frame.select("group", first=first, second=second).drop_nulls(["first", "second"])
    varied = (pl.col("first").min() < pl.col("first").max()) & (pl.col("second").min() < pl.col("second").max())
    rho = pl.when(varied).then(pl.corr("first", "second", method="spearman").clip(-1.0, 1.0)).alias("rho")
    groups = pairs.group_by("group", maintain_order=True).agg(rho)["rho"]
    return {
        "pairs": pairs.height,  # samples that have both values
        "overall": number_or_none(pairs.select(rho).item()) if pairs.height else None,  # None where a side is constant
        "within_groups": number_or_none(groups.mean()),  # mean over the groups in which it is defined
        "groups": len(groups) - groups.null_count(),
        "groups_undefined": groups.null_count(),
    }


def quantiles_of(values: pl.Series) -> Statistics | None:
    """Compute QUANTILES of finite values, interpolated linearly, nulls left out; None without any."""
    if values.count() == 0:
        return None
    return {name: values.quantile(share, "linear") for name, share in QUANTILES.items()}


def histogram_of(values: pl.Series) -> Histogram | None:
    """Return counts and edges of BINS bins, from 0 to 1 where all finite values lie there; None without any."""
    known = values.drop_nulls().to_numpy()
    if not known.size:
        return None
    return np.histogram(known, BINS, (0.0, 1.0) if known.min() >= 0 and known.max() <= 1 else None)
