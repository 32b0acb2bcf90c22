"""Read and write Parquet, with a digest of a table's values."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MEASURED = ("seconds",)
"""Columns that differ between runs and that no later stage reads."""

DIGESTS = "grpo.digests"
"""Key of the file's metadata with one digest per write."""


class TableWriter:
    """Writes one Parquet file batch by batch and digests its values on the way.

    The digest of the table is computed from the digests of its batches, which the file stores. So the
    digest of several files with the batches of one file is that file's, without reading the values again.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Open the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.schema = schema
        self.rows = 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._kept = [name for name in schema.names if name not in MEASURED]
        self._digests: list[str] = []

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Append rows, one sequence or array per column, as one row group with its digest."""
        table = pa.table([_array(columns[field.name], field.type) for field in self.schema], schema=self.schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows
        kept = table.select(self._kept)
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), kept.schema) as stream:
            stream.write_table(kept)
        self._digests.append(hashlib.sha256(sink.getvalue()).hexdigest())

    def close(self) -> str:
        """Finish the file and return the digest of all values except measured times."""
        self._writer.add_key_value_metadata({DIGESTS: json.dumps(self._digests)})
        self._writer.close()
        return joint_digest(self._digests)


def _array(values: Sequence[Any] | pa.Array, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)


def write_table(path: Path, schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> str:
    """Write one Parquet file at once and return the digest of its values."""
    writer = TableWriter(path, schema)
    writer.write(columns)
    return writer.close()


def joint_digest(digests: Sequence[str]) -> str:
    """Return one digest for several tables, in the given order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def part_digests(path: Path) -> list[str]:
    """Return the digests of a file's writes, in order; `joint_digest` of those of all parts is the table's digest.

    Raises:
        ValueError: the file has none.
    """
    metadata = pq.read_metadata(path).metadata or {}
    if DIGESTS.encode() not in metadata:
        raise ValueError(f"{path.name} has no digests of its batches; use the version that wrote it")
    return [str(digest) for digest in json.loads(metadata[DIGESTS.encode()])]


def read_table(folder: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read all Parquet files of a folder as one table, parts in the order of their names.

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
