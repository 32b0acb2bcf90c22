"""The file formats of prompt sets: each reader turns a file's content into rows with their place in the file."""

import csv
import datetime
import decimal
import io
import json
import math
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.errors import InputError

_SIGNATURES = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a WebP image or another RIFF file",
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"\x1f\x8b": "a gzip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_QUOTED_FIELD = re.compile(r'(?:(?<=[\t\r\n])|\A)"((?:[^"]|"")*+)"(?=[\t\r\n]|\Z)')
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+")


class PromptRow(NamedTuple):
    """One row of a prompt file: its place, for errors (``data.prompts: FILE, line N``) and its plain JSON values."""

    place: str
    values: dict[str, object]


def read_rows(content: bytes, *, name: str, place: str, text_columns: Collection[str]) -> list[PromptRow]:
    """Read the rows of a prompt file; the ending of its name determines the format.

    Args:
        name: the file's name or address; the ending is one of :data:`READERS`, in upper or lower case.
        text_columns: columns of CSV and TSV files that are text even where every cell looks like a number.

    Raises:
        InputError: unknown ending, not text, or not well-formed; with the line if known.
    """
    ending = posixpath.splitext(name)[1].lower()
    if ending not in READERS:
        raise InputError(place, name, f"Prompts are read from {', '.join(READERS)}. Convert the file to one of these.")
    if not content:
        raise InputError(place, "an empty file", "Put at least one prompt into it.")
    rows = list(READERS[ending](content, place))
    return _with_plain_types(rows, text_columns) if ending in (".csv", ".tsv") else rows


def _decode(content: bytes, place: str) -> str:
    """Decode UTF-8; ``utf-8-sig`` because spreadsheets write a byte order mark, not part of the first field."""
    try:
        text = content.decode("utf-8-sig")
        broken = content.find(b"\0")
    except UnicodeDecodeError as error:
        broken = error.start
    if broken < 0:
        return text
    line = content.count(b"\n", 0, broken) + 1
    kinds = [kind for signature, kind in _SIGNATURES.items() if content.startswith(signature)]
    found = kinds[0] if kinds else content[broken : broken + 4]
    hint = "This is not UTF-8 text. Save the file as UTF-8 text, or name the file with the prompts."
    raise InputError(f"{place}, line {line}", found, hint)


def _read_txt(content: bytes, place: str) -> Iterator[PromptRow]:
    for number, line in _lines(_decode(content, place)):
        yield PromptRow(f"{place}, line {number}", {"prompt": line})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers.

    Not str.splitlines, which also breaks lines at form feeds, U+0085, U+2028 and U+2029: they occur inside prompts.
    """
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            yield number, line.rstrip("\n")


def _read_json(content: bytes, place: str) -> Iterator[PromptRow]:
    text = _decode(content, place)
    if not text.lstrip().startswith("["):
        for number, line in _lines(text):
            where = f"{place}, line {number}"
            yield PromptRow(where, _json_object(_parse_json(line, place, first_line=number), where))
        return
    items = _parse_json(text, place, first_line=1)
    assert isinstance(items, list), "JSON that begins with a bracket is an array"
    for number, item in enumerate(items, start=1):
        where = f"{place}, item {number}"
        yield PromptRow(where, _json_object(item, where))


def _json_object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InputError(place, value, 'Each prompt is a JSON object such as {"prompt": "a red circle"}.')
    return value


def _parse_json(text: str, place: str, *, first_line: int) -> object:
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        # A lone surrogate (an escaped half of an emoji) is JSON, but no text: neither a tokenizer nor Parquet takes it.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"{place}, line {first_line + error.lineno - 1}"
        hint = f"Invalid JSON at column {error.colno}: {error.msg}. Give one object per line, or one array of objects."
        raise InputError(where, _shortened(text.split("\n")[error.lineno - 1]), hint) from None
    except RecursionError:
        hint = "The values are nested too deeply. Flatten them."
        raise InputError(f"{place}, line {first_line}", _shortened(text), hint) from None
    except ValueError as error:
        hint = f"Not usable as JSON: {error}. Correct the value."
        raise InputError(f"{place}, line {first_line}", _shortened(text), hint) from None
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is beyond the range of a double")
    return value


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _read_csv(content: bytes, place: str) -> Iterator[PromptRow]:
    yield from _read_table(_decode(content, place), place, delimiter=",", quoted=True)


def _read_tsv(content: bytes, place: str) -> Iterator[PromptRow]:
    text = _decode(content, place)
    yield from _read_table(text, place, delimiter="\t", quoted=_is_quoted_tsv(text))


def _is_quoted_tsv(text: str) -> bool:
    """Return whether a TSV file quotes its fields as CSV does, or writes every character literally.

    Both kinds are common: spreadsheets and data frames quote, PartiPrompts has prompts that begin with a quoted word.
    A file is quoted when every quotation mark in it belongs to a quoted field, and one of these fields needed its
    quotes, is empty, or is in the header. So a prompt that is one quoted word keeps its quotes.
    """
    if '"' in _QUOTED_FIELD.sub("", text):
        return False
    fields = list(_QUOTED_FIELD.finditer(text))
    header = len(text.split("\n", 1)[0])
    return any(match.start() < header or not match[1] or re.search(r'["\t\r\n]', match[1]) for match in fields)


def _read_table(text: str, place: str, *, delimiter: str, quoted: bool) -> Iterator[PromptRow]:
    records = _records(text, place, delimiter, quoted)
    _, header = next(records, (0, []))
    names = [name.strip() for name in header]
    _refuse_duplicate_columns(names, place)
    for number, cells in records:
        if len(cells) != len(names):
            raise InputError(
                f"{place}, line {number}",
                f"{len(cells)} fields",
                f"The header has {len(names)}: {', '.join(names)}. "
                + (f"Put quotes around a field with {delimiter!r}." if quoted else "Put one tab between fields."),
            )
        values: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}
        yield PromptRow(f"{place}, line {number}", values)


def _records(text: str, place: str, delimiter: str, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank, with the line on which each begins.

    The csv module, because it counts lines and leaves short records visible; polars fills them up with nulls.
    """
    lines = io.StringIO(text, newline="")
    if quoted:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
    else:
        reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    first = 1
    try:
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        hint = f"Not well-formed: {error}. Close every quote, and double a quote inside quotes."
        raise InputError(f"{place}, line {first}", "an unreadable record", hint) from None


def _refuse_duplicate_columns(names: Sequence[str], place: str) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(place, ", ".join(duplicates), "A column name appears twice. Rename or remove one.")


def _with_plain_types(rows: Sequence[PromptRow], text_columns: Collection[str]) -> list[PromptRow]:
    """Convert columns of numbers and truth values in place; the others, and ``text_columns``, stay text."""
    for name in rows[0].values if rows else ():
        cells = {str(row.values[name]) for row in rows if row.values[name] is not None}
        convert = str if name in text_columns else _column_type(cells)
        for row in rows:
            if row.values[name] is not None:
                row.values[name] = convert(str(row.values[name]))
    return list(rows)


def _column_type(cells: Collection[str]) -> Callable[[str], object]:
    """Choose the type of a column's cells; numbers only where writing them again gives the same text.

    So a text to render such as 007 or 1.50 stays text.
    """
    if cells and set(cells) <= {"true", "false", "True", "False"}:
        return lambda cell: cell.lower() == "true"
    if all(_INTEGER.fullmatch(cell) for cell in cells):
        return int
    if all(_INTEGER.fullmatch(cell) or (_DECIMAL.fullmatch(cell) and repr(float(cell)) == cell) for cell in cells):
        return float
    return str


def _read_parquet(content: bytes, place: str) -> Iterator[PromptRow]:
    try:
        table = pq.ParquetFile(pa.BufferReader(content)).read()
        names, records = table.column_names, table.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(place, f"unreadable Parquet ({error})", "Write the file again.") from error
    _refuse_duplicate_columns(names, place)
    for number, record in enumerate(records, start=1):
        where = f"{place}, row {number}"
        yield PromptRow(where, {name: _plain(value, f"{where}, column {name}") for name, value in record.items()})


def _plain(value: object, place: str) -> object:
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
            return [_plain(item, place) for item in value]
        case dict():
            return {name: _plain(item, place) for name, item in value.items()}
        case _:
            raise InputError(
                place, f"a value of type {type(value).__name__}", "Remove this column, or write it as text or numbers."
            )


READERS: dict[str, Callable[[bytes, str], Iterator[PromptRow]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
