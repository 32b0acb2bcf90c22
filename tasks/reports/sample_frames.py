"""Frames of samples before anything is reckoned from them: columns that must be there, gaps, and rounding."""

import math
from collections.abc import Iterable, Sequence

import polars as pl

GROUP = ("run", "iteration", "group_id")
"""What a group is told apart by: two runs name theirs alike."""

SAMPLE = ("run", "sample_id")
"""What a sample is told apart by."""

DIGITS = 12
"""Of a column's largest value: sums of the same rewards in another order agree in these, in fp64."""


def require_columns(frame: pl.DataFrame, columns: Iterable[str], what: str) -> None:
    """Refuse a frame that lacks some of these columns.

    Raises:
        ValueError: one is missing; all of them are named.
    """
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{what} lack the columns {', '.join(missing)}; they have {', '.join(frame.columns)}")


def require_unique(frame: pl.DataFrame, columns: Sequence[str], what: str) -> None:
    """Refuse a frame that says something twice of one thing.

    Raises:
        ValueError: two rows have the same values in these columns; one such is named.
    """
    twice = frame.filter(frame.select(columns).is_duplicated())
    if twice.height:
        named = ", ".join(
            f"{column} {value!r}" for column, value in zip(columns, twice.select(columns).row(0), strict=True)
        )
        raise ValueError(f"{what} hold {named} more than once")


def settled(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """These columns in fp64, null where they are not finite, without what is left of rounding.

    Ranks, ties and constant groups would otherwise be decided by the last bit of a weighted sum.
    """
    numbers = finite(frame, columns)
    return numbers.with_columns(pl.col(column).round(_decimals(numbers[column])) + 0.0 for column in columns)


def finite(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """These columns in fp64, null where they are not finite."""
    numbers = frame.with_columns(pl.col(columns).cast(pl.Float64))
    return numbers.with_columns(
        pl.when(pl.col(column).is_finite()).then(pl.col(column)).alias(column) for column in columns
    )


def with_groups(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with its groups numbered, in the column `group`."""
    return frame.with_columns(pl.struct(GROUP).rank("dense").alias("group"))


def number_or_none(value: object) -> float | None:
    """A statistic as a Python number; None where it is not defined."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _decimals(column: pl.Series) -> int:
    largest = number_or_none(column.abs().max())
    return 0 if not largest else min(300, max(0, DIGITS - math.ceil(math.log10(largest))))
