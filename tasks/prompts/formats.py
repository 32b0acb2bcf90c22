"""Prompt files -> tables, by the ending of a file's name: text, JSON, CSV, TSV, Parquet."""

import datetime
import decimal
import functools
import glob
import math
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.errors import InputError, first_line
from tasks.prompts.files import InputFile, file_ending
from tasks.prompts.text_formats import (
    PromptRow,
    decode_text,
    read_delimited,
    read_json,
    read_one_txt,
    read_txt,
    refuse_duplicate_columns,
    refuse_failed_download,
)

ENDINGS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")  # in any case; all but Parquet also with ``.gz``

_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


class ImageRow(NamedTuple):
    """The columns of a row that have images; `again` reads a column once more, if nobody keeps its bytes."""

    values: Mapping[str, object]
    again: Callable[[str], object] | None = None


@dataclass(frozen=True)
class PromptTable:
    """The rows of one prompt file."""

    place: str  # for errors
    columns: tuple[str, ...]  # names of its columns, in their order; none if it has no rows
    binary: frozenset[str]  # names of those that have no JSON values, such as images
    # Yields the rows with those of the given columns that a row has; no binary ones.
    read: Callable[[Collection[str]], Iterator[PromptRow]]
    # Yields these columns of the same rows, which may be binary.
    read_images: Callable[[Collection[str]], Iterator[ImageRow]]


def open_table(file: InputFile, *, in_folder: bool) -> PromptTable:
    """Open a prompt file: text is read at once, Parquet when its rows are.

    A ``.txt`` file `in_folder` is one prompt. InputError, with the line if known, for an unknown ending, an empty file,
    and one that is not well-formed.
    """
    place, ending = f"{file.place}: {file.uri}", file_ending(file.path)
    if ending not in ENDINGS:
        hint = f"Prompts are read from {', '.join(ENDINGS)}, or a folder of them. Convert the file to one of these."
        raise InputError(place, posixpath.basename(file.path), hint)
    if ending == ".parquet":
        return _open_parquet(file, place)
    content = file.read()
    if not content:
        raise InputError(place, "an empty file", "Put at least one prompt into it.")
    text = decode_text(content, place)
    match ending:
        case ".txt" if in_folder:
            rows = list(read_one_txt(text, place, posixpath.basename(file.path)))
        case ".txt":
            rows = list(read_txt(text, place))
        case ".csv" | ".tsv":
            rows = list(read_delimited(text, place, literal=ending == ".tsv"))
        case _:
            rows = list(read_json(text, place))
    return _table_of(rows, place)


def _table_of(rows: Sequence[PromptRow], place: str) -> PromptTable:
    def read(columns: Collection[str]) -> Iterator[PromptRow]:
        for row in rows:
            yield PromptRow(row.place, {name: value for name, value in row.values.items() if name in columns})

    def read_images(columns: Collection[str]) -> Iterator[ImageRow]:
        for row in rows:
            yield ImageRow({name: row.values.get(name) for name in columns})

    found = tuple(dict.fromkeys(name for row in rows for name in row.values))
    return PromptTable(place, found, frozenset(), read, read_images)


def _open_parquet(file: InputFile, place: str) -> PromptTable:
    with _parquet(file, place) as parquet:
        schema = parquet.schema_arrow
    refuse_duplicate_columns(schema.names, place)

    def read(columns: Collection[str]) -> Iterator[PromptRow]:
        wanted = [name for name in schema.names if name in columns]
        with _parquet(file, place) as parquet:
            records = (record for batch in parquet.iter_batches(columns=wanted) for record in batch.to_pylist())
            yield from plain_rows(records, wanted, place)

    def read_images(columns: Collection[str]) -> Iterator[ImageRow]:
        wanted = [name for name in schema.names if name in columns]
        table = _mapped(file, place, wanted or schema.names[:1])
        for number in range(len(table)):
            again = functools.partial(_cell, table, number)
            yield ImageRow({name: again(name) for name in wanted}, again)

    binary = frozenset(field.name for field in schema if has_bytes(field.type))
    return PromptTable(place, tuple(schema.names), binary, read, read_images)


def _mapped(file: InputFile, place: str, columns: Sequence[str]) -> Any:
    """Return columns of a Parquet file as `datasets` maps them into memory, where a row is found by its number."""
    import datasets

    # Parquet decodes a whole row group for one row, so `datasets` writes the columns to its cache as Arrow first.
    pattern = glob.escape(file.filesystem.unstrip_protocol(file.path))
    try:
        found = datasets.load_dataset("parquet", data_files=pattern, columns=list(columns), split="train")
    except (datasets.exceptions.DatasetsError, pa.ArrowException, OSError, ValueError) as error:
        raise InputError(place, f"unreadable Parquet ({first_line(error)})", "Write the file again.") from error
    return found.with_format("arrow")


def _cell(table: Any, row: int, column: str) -> object:
    return table[row][column][0].as_py()


@contextmanager
def _parquet(file: InputFile, place: str) -> Iterator[pq.ParquetFile]:
    with file.open() as stream:
        try:
            yield pq.ParquetFile(stream)
        except InputError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            stream.seek(0)
            beginning = stream.read(1000)
            if not beginning:
                raise InputError(place, "an empty file", "Put at least one prompt into it.") from None
            refuse_failed_download(beginning.decode(errors="replace"), place)
            raise InputError(place, f"unreadable Parquet ({error})", "Write the file again.") from error


def has_bytes(kind: pa.DataType) -> bool:
    """Return whether values of this type are bytes or contain them, as an image does."""
    match kind:
        case pa.BaseExtensionType():
            return has_bytes(kind.storage_type)
        case pa.DictionaryType():
            return has_bytes(kind.value_type)
    if any(test(kind) for test in _BYTES):
        return True
    return any(has_bytes(kind.field(index).type) for index in range(kind.num_fields))


def plain_rows(records: Iterable[Mapping[str, Any]], columns: Sequence[str], place: str) -> Iterator[PromptRow]:
    """Yield these columns of the records as plain JSON values; InputError names the row and the column of any other."""
    for number, record in enumerate(records, start=1):
        where = f"{place}, row {number}"
        yield PromptRow(where, {name: _plain_value(record[name], f"{where}, column {name}") for name in columns})


def _plain_value(value: object, place: str) -> object:
    """Convert a Parquet value to a JSON value; times become ISO 8601 text, decimals become floats."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() | decimal.Decimal():
            if math.isfinite(value):
                return float(value)
            raise InputError(place, float(value), "Write null for a number that is missing.")
        case datetime.date() | datetime.time():
            return value.isoformat()
        case list():
            return [_plain_value(item, place) for item in value]
        case dict():
            return {name: _plain_value(item, place) for name, item in value.items()}
        case _:
            hint = "Write it as text, or leave the column out of those that the configuration lists as `columns`."
            raise InputError(place, f"a value of type {type(value).__name__}", hint)
