"""Read stored advantages, which have a row per sample and stream."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_core.streams import STREAMS

STREAM = "stream"


def read_advantages(files: Sequence[Path], columns: Sequence[str] | None = None) -> pa.Table:
    """Read tables of advantages with the column `stream`.

    Args:
        files: at least one.
        columns: names of the columns to read besides `stream`; None for all.
    """
    wanted = None if columns is None else [*columns, STREAM]
    # Unlike read_table, it does not import pandas.
    return pa.concat_tables([pq.ParquetFile(path).read(columns=wanted) for path in files])


def leading_stream(table: pa.Table) -> pa.Table:
    """Return the rows of the table's first stream in the order of STREAMS, whose statistics are the run's.

    The streams can have different rewards, so those of one are not to be averaged with those of another.
    """
    found = set(table[STREAM].to_pylist())
    first = next((stream for stream in STREAMS if stream in found), STREAMS[0])
    return table.filter(pc.equal(table[STREAM], first))
