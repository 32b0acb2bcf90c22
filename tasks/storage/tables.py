"""Parquet in and out, and the digest of a table's values."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MEASURED = ("seconds",)
"""Columns that differ from run to run and that no later stage reads."""


class TableWriter:
    """Writes one Parquet file batch by batch and digests its values on the way."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Open the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.schema = schema
        self.rows = 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._kept = [name for name in schema.names if name not in MEASURED]
        self._sha256 = hashlib.sha256()

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Append rows, one sequence or array a column."""
        table = pa.table([_array(columns[field.name], field.type) for field in self.schema], schema=self.schema)
        self._writer.write_table(table)
        self.rows += table.num_rows
        kept = table.select(self._kept)
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), kept.schema) as stream:
            stream.write_table(kept)
        self._sha256.update(sink.getvalue())

    def close(self) -> str:
        """Finish the file; the digest of all values except measured times."""
        self._writer.close()
        return self._sha256.hexdigest()


def _array(values: Sequence[Any] | pa.Array, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)


def write_table(path: Path, schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> str:
    """Write one Parquet file at once; the digest of its values."""
    writer = TableWriter(path, schema)
    writer.write(columns)
    return writer.close()


def joint_digest(digests: Sequence[str]) -> str:
    """One digest for several tables, in the given order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def read_table(folder: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """All Parquet files of a folder as one table, parts in the order of their names.

    Raises:
        ValueError: a file was written with another schema.
    """
    parts = []
    for path in sorted(folder.glob("*.parquet")):
        found = pq.read_schema(path)
        if not found.equals(schema, check_metadata=False):
            raise ValueError(f"{path.name} has another schema than this version reads; use the version that wrote it")
        parts.append(pq.read_table(path, columns=list(columns) if columns else None))
    return pa.concat_tables(parts)
