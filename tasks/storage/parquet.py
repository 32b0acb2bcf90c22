"""Read and write Parquet, with a digest of a table's values; and stored advantages."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from grpo_core.errors import InputError
from grpo_core.rollouts.streams import STREAMS
from tasks.storage.files import is_local, matching

if TYPE_CHECKING:
    import polars as pl

MEASURED = ("seconds",)  # columns that differ between runs and that no later stage reads
DIGESTS = "grpo.digests"  # key of the file's metadata with one digest per write
ROW_GROUP_BYTES = 16 * 2**20  # in memory, from which a row group is written; who reads one image reads its whole group

_ASCENDING = ("support_ids",)
_ELEMENT = ".list.element"


class TableWriter:
    """Writes one Parquet file batch by batch, with the digest of each, which together make the table's digest.

    So the digest of several files with the batches of one file is that file's, without reading the values again.
    Small batches share a row group, since one alone takes several kilobytes and a millisecond for its columns.
    """

    def __init__(self, path: Path | io.BytesIO, schema: pa.Schema) -> None:
        """Open the file, or write to memory."""
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.schema = schema
        self.rows = 0
        self._writer = encoding_writer(path, schema)
        self._columns = [(field.name, field.type) for field in schema]
        self._digests: list[str] = []
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Append rows, one sequence or array per column, with one digest."""
        table = pa.table([_array(columns[name], kind) for name, kind in self._columns], schema=self.schema)
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()
        self.rows += table.num_rows
        self._digests.append(values_digest(table))

    def close(self) -> str:
        """Finish the file and return the digest of all values except measured times."""
        self._write_row_group()
        self._writer.add_key_value_metadata({DIGESTS: json.dumps(self._digests)})
        self._writer.close()
        return joint_digest(self._digests)

    def _write_row_group(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting).combine_chunks()
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self._waiting_bytes = [], 0


def encoding_writer(path: Path | io.BytesIO, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet file whose lists of numbers, most of them different, are stored without a dictionary.

    Each of their bytes is compressed apart from the others (BYTE_STREAM_SPLIT): 3.3 bytes for a log-prob instead of
    5.8. Ascending ids are stored as differences: 0.6 bytes instead of 1.9 under nucleus sampling. PNGs and latents are
    not compressed: zstd would save nothing and 8 %, and take longer than all else.
    """
    kinds = dict(_leaves(schema))
    lists = {path: kind for path, kind in kinds.items() if path.endswith(_ELEMENT)}
    ascending = [f"{name}{_ELEMENT}" for name in _ASCENDING]
    numbers = [path for path, kind in lists.items() if kind in (pa.int32(), pa.float32())]
    return pq.ParquetWriter(
        path,
        schema,
        compression={path: "none" if kind == pa.binary() else "zstd" for path, kind in kinds.items()},
        use_dictionary=[path for path, kind in kinds.items() if path not in lists and kind != pa.binary()],
        use_byte_stream_split=[path for path in numbers if path not in ascending],
        column_encoding={path: "DELTA_BINARY_PACKED" for path in numbers if path in ascending},
    )


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Yield path and type of each column of the file: list elements and the fields of structs have their own."""
    for field in schema:
        if pa.types.is_list(field.type):
            yield f"{field.name}{_ELEMENT}", field.type.value_type
        elif pa.types.is_struct(field.type):
            yield from ((f"{field.name}.{inner.name}", inner.type) for inner in field.type)
        else:
            yield field.name, field.type


def _array(values: Sequence[Any] | pa.Array, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)


def write_table(path: Path | io.BytesIO, schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> str:
    """Write one Parquet file at once and return the digest of its values."""
    writer = TableWriter(path, schema)
    writer.write(columns)
    return writer.close()


def values_digest(table: pa.Table) -> str:
    """Return the digest of one write: of all values except measured times."""
    kept = table.select([name for name in table.schema.names if name not in MEASURED])
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), kept.schema) as stream:
        stream.write_table(kept)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def joint_digest(digests: Sequence[str]) -> str:
    """Return one digest for several tables, in the given order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def part_digests(path: Path) -> list[str]:
    """Return the digests of a file's writes, in order; ValueError if the file has none."""
    metadata = pq.read_metadata(path).metadata or {}
    if DIGESTS.encode() not in metadata:
        raise ValueError(f"{path.name} has no digests of its batches; use the version that wrote it")
    return [str(digest) for digest in json.loads(metadata[DIGESTS.encode()])]


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
_UNPACKED_BYTES, _UNPACKED_SHARE = 2**29, 64


def oversized(source: Path | pa.NativeFile | IO[bytes], size: int) -> str | None:
    """Return why a Parquet file of `size` bytes is not read: what it unpacks to; None for one that may be.

    A few bytes can stand for a billion equal values. Those of this project are mostly log-probs and images, which are
    hardly smaller than in memory. What is no Parquet file raises pa.ArrowException or OSError.
    """
    with pq.ParquetFile(source) as file:
        limit = max(_UNPACKED_BYTES, _UNPACKED_SHARE * size)
        groups, rows = range(file.num_row_groups), file.metadata.num_rows
        packed = sum(file.metadata.row_group(index).total_byte_size for index in groups)
        flat = not any(pa.types.is_nested(field.type) for field in file.schema_arrow)
        # Of texts each could be as long as all bytes together, which are few in a table of short ones.
        if flat and rows * (8 * len(file.schema_arrow) + packed) <= limit:
            return None
        for index in groups:
            # pyarrow aborts the process where the footer's columns are damaged, unless it has read from them.
            next(file.iter_batches(1, row_groups=[index]), None)
        stored = [file.metadata.row_group(index) for index in groups]
        chunks = [group.column(number) for group in stored for number in range(group.num_columns)]
        unpacked = sum(each.num_values * _WIDTHS.get(each.physical_type, 8) for each in chunks)
        if unpacked <= limit:
            texts = [each for each in chunks if each.physical_type == "BYTE_ARRAY"]
            if sum(each.num_values * each.total_uncompressed_size for each in texts) > limit:
                unpacked += _bytes_of_texts(file, texts, limit)
    return None if unpacked <= limit else f"unpacks to {unpacked / 2**30:,.1f} GiB, far more than the file has"


def oversized_file(filesystem: AbstractFileSystem, path: str) -> str | None:
    """Return why a Parquet file of a disk is not read; one of a bucket is measured once it has been fetched."""
    if not is_local(filesystem):
        return None
    try:
        return oversized(Path(path), Path(path).stat().st_size)
    except (pa.ArrowException, OSError):
        return None  # who reads it says why it cannot


def _bytes_of_texts(file: pq.ParquetFile, chunks: Sequence[pq.ColumnChunkMetaData], limit: int) -> int:
    """Return the size in memory of the columns of these chunks, or the first size beyond the limit."""
    if any(pa.types.is_dictionary(field.type) for field in file.schema_arrow):
        return limit + 1  # no table here has one, and its size in memory says nothing
    names = list(dict.fromkeys(each.path_in_schema.partition(".")[0] for each in chunks))
    rows = limit // (4 * max(each.total_uncompressed_size for each in chunks))
    unpacked = 0
    for batch in file.iter_batches(max(1, min(rows, 2**16)), columns=names):
        unpacked += batch.nbytes
        if unpacked > limit:
            break
    return unpacked


def read_checked(content: bytes, schema: pa.Schema) -> dict[str, list[Any]]:
    """Read a table that was written at once and has no manifest; ValueError if any byte was changed."""
    try:
        if (reason := oversized(pa.BufferReader(content), len(content))) is not None:
            raise ValueError(f"it {reason}")
        file = pq.ParquetFile(pa.BufferReader(content))
        table = file.read().cast(schema).combine_chunks()
        stated = json.loads(file.metadata.metadata[DIGESTS.encode()])
        digest = values_digest(table)
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a valid table ({type(error).__name__})") from error
    if stated != [digest]:
        raise ValueError("its values were changed")
    # From arrays: of lists, pyarrow asks pandas first, whose import takes as long as all else.
    write_table(again := io.BytesIO(), schema, {name: table[name].combine_chunks() for name in schema.names})
    # Another version of pyarrow writes the same values as other bytes.
    if pq.read_metadata(again).created_by == file.metadata.created_by and again.getvalue() != content:
        raise ValueError("its bytes were changed")
    columns: dict[str, list[Any]] = table.to_pydict()
    return columns


def scan_tables(files: Sequence[Path]) -> "pl.LazyFrame":
    """Scan Parquet files as one table, in this order; no character of their paths is a pattern."""
    import polars as pl

    return pl.scan_parquet(list(files), glob=False)


def read_columns(filesystem: AbstractFileSystem, folder: str, names: str, columns: Sequence[str]) -> pa.Table:
    """Read columns of tables that match a pattern, unverified; those that a table lacks are left out."""
    parts = []
    for path in matching(filesystem, folder, names):
        if (reason := oversized_file(filesystem, path)) is not None:
            raise InputError(path, reason, "No run has written it so. Remove it, or choose other iterations.")
        with filesystem.open(path) as stream:
            file = pq.ParquetFile(stream)
            parts.append(file.read(columns=[name for name in columns if name in file.schema_arrow.names]))
    return pa.concat_tables(parts, promote_options="default")


def read_table(folder: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read all Parquet files of a folder, in the order of names, as one table; ValueError for another schema."""
    parts = []
    for path in sorted(folder.glob("*.parquet")):
        found = pq.read_schema(path)
        if not found.equals(schema, check_metadata=False):
            raise ValueError(f"{path.name} has another schema than this version reads; use the version that wrote it")
        parts.append(pq.read_table(path, columns=list(columns) if columns else None))
    return pa.concat_tables(parts)


STREAM = "stream"


def read_advantages(files: Sequence[Path], columns: Sequence[str] | None = None) -> pa.Table:
    """Read at least one table of advantages, with the column `stream` and these, or all."""
    wanted = None if columns is None else [*columns, STREAM]
    # Unlike read_table, it does not import pandas.
    return pa.concat_tables([pq.ParquetFile(path).read(columns=wanted) for path in files])


def leading_stream(table: pa.Table) -> pa.Table:
    """Return the rows of the table's first stream, whose statistics are the run's: rewards can differ by stream."""
    found = set(table[STREAM].to_pylist())
    first = next((stream for stream in STREAMS if stream in found), STREAMS[0])
    return table.filter(pc.equal(table[STREAM], first))
