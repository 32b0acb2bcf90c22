"""Read stored advantages, which have a row per sample and stream."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from grpo_core.streams import STREAMS, Stream

STREAM = "stream"
_BEFORE_STREAMS: Stream = "tokens"


def read_advantages(files: Sequence[Path], columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read tables of advantages with the column `stream`; those of runs that knew no streams are of tokens.

    Args:
        columns: names of the columns to read besides `stream`; None for all.
    """
    return pl.concat([select_advantages(pl.scan_parquet(path), columns).collect() for path in files])


def select_advantages(table: pl.LazyFrame, columns: Sequence[str] | None = None) -> pl.LazyFrame:
    """Select columns as `read_advantages` does."""
    if STREAM not in table.collect_schema().names():
        table = table.with_columns(pl.lit(_BEFORE_STREAMS).alias(STREAM))
    return table if columns is None else table.select(*columns, STREAM)


def leading_stream(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the table's first stream in the order of STREAMS, whose statistics are the run's.

    The streams can have different rewards, so those of one are not to be averaged with those of another.
    """
    return table.filter(pl.col(STREAM) == next((each for each in STREAMS if each in table[STREAM]), STREAMS[0]))


def one_per_sample(table: pl.DataFrame) -> pl.DataFrame:
    """Return one row per sample: that of its first stream in the order of STREAMS.

    Args:
        table: with the columns stream, sample_id and, if samples of several iterations are in it, iteration.
    """
    keys = [name for name in ("sample_id", "iteration") if name in table.columns]
    place = pl.col(STREAM).replace_strict({each: index for index, each in enumerate(STREAMS)})
    return table.filter(place == place.min().over(keys))
