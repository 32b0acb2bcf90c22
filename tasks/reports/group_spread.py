"""Mean and spread of one reward over samples in groups."""

from dataclasses import dataclass

import polars as pl

from tasks.reports.sample_frames import number_or_none


@dataclass(frozen=True)
class Spread:
    """One reward over samples.

    Attributes:
        samples: all of them.
        values: samples that have a value.
        null_share: share of samples without one; None without samples.
        mean: over values; None without any.
        std: over values, Bessel-corrected; None with fewer than two.
        within_groups: mean over groups with at least two values of their Bessel-corrected standard deviation.
        groups: groups with a value.
        groups_without_spread: share of these with fewer than two values, or with equal ones: they teach nothing.
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
    """Statistics of a settled column over the groups that the column `group` numbers."""
    values = frame.select("group", value=column).drop_nulls("value")
    flat = pl.col("value").min() == pl.col("value").max()
    groups = values.group_by("group", maintain_order=True).agg(
        flat.alias("flat"),
        pl.len().alias("size"),
        pl.when(flat).then(0.0).otherwise(pl.col("value").std()).alias("std"),
    )
    return Spread(
        samples=frame.height,
        values=values.height,
        null_share=(frame.height - values.height) / frame.height if frame.height else None,
        mean=number_or_none(values["value"].mean()),
        std=_std(values["value"]),
        within_groups=number_or_none(groups.filter(pl.col("size") > 1)["std"].mean()),
        groups=groups.height,
        groups_without_spread=number_or_none(groups["flat"].mean()),
    )


def _std(values: pl.Series) -> float | None:
    return 0.0 if len(values) > 1 and values.min() == values.max() else number_or_none(values.std())
