"""The text of prompt files -> rows: lines, JSON, CSV, TSV; what is not well-formed is named with its line."""

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from grpo_core.errors import InputError

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MARKUP = re.compile(r"(?:\s|<!--.*?-->)*<(?:!doctype|html|head|body|\?xml)\b", re.IGNORECASE | re.DOTALL)
_LFS_POINTER = "version https://git-lfs.github.com/spec/"
_QUOTED_FIELD = re.compile(r'(?:(?<=[\t\r\n])|\A)"((?:[^"]|"")*+)"(?=[\t\r\n]|\Z)')


class PromptRow(NamedTuple):
    """One row of a prompt file: its place, for errors (``data.prompts: FILE, line N``) and its plain JSON values."""

    place: str
    values: dict[str, object]


def decode_text(content: bytes, place: str) -> str:
    """Decode UTF-8, with or without a byte order mark, or UTF-16 with one; InputError names the line of other text."""
    try:
        # A byte order mark, as spreadsheets write it, is not part of the first field.
        text = content.decode("utf-16" if content.startswith(_UTF16_MARKS) else "utf-8-sig")
        before, broken, after = text.partition("\0")
        found: object = broken + after[:3]
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode(error.encoding, "replace")
        found = error.object[error.start : error.start + 4]
    if not found:
        refuse_failed_download(text, place)
        return text
    hint = "This is not UTF-8 text, nor UTF-16 with a byte order mark. Save it as UTF-8, or name the file with prompts."
    raise InputError(f"{place}, line {before.count(chr(10)) + 1}", found, hint)


def refuse_failed_download(text: str, place: str) -> None:
    """Raise InputError when a file, or its beginning, is a web page, an XML error or a Git LFS pointer."""
    if _MARKUP.match(text):
        hint = "The download probably failed and this is the server's error page. Open the file, and download it again."
        raise InputError(place, _shortened(text.strip().split("\n")[0]), f"This is HTML or XML. {hint}")
    if text.startswith(_LFS_POINTER):
        hint = "The repository was cloned without its large files: run `git lfs pull` in it."
        raise InputError(place, "a Git LFS pointer", hint)


def read_txt(text: str, place: str) -> Iterator[PromptRow]:
    """Yield the lines that are not blank, as column ``prompt``."""
    for number, line in _lines(text):
        yield PromptRow(f"{place}, line {number}", {"prompt": line})


def read_one_txt(text: str, place: str, name: str) -> Iterator[PromptRow]:
    """Yield the only prompt of a file in a folder, with its name as `file_name`; InputError for several lines."""
    lines = [line for _, line in _lines(text)]
    if len(lines) != 1:
        hint = (
            "In a folder, each .txt file is one prompt on one line. Name the file instead of the folder, or use .jsonl."
        )
        raise InputError(place, f"{len(lines)} lines", hint)
    yield PromptRow(place, {"prompt": lines[0], "file_name": name})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    # str.splitlines also breaks at form feeds, U+0085, U+2028 and U+2029, which occur inside prompts.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            yield number, line.rstrip("\n")


def read_json(text: str, place: str) -> Iterator[PromptRow]:
    """Yield the objects or the strings of JSON lines, or of one array; a string is column ``prompt``."""
    kind: type | None = None
    for where, value in _json_values(text, place):
        kind = type(value) if kind is None else kind
        if not isinstance(value, dict | str) or type(value) is not kind:
            hint = 'Give objects such as {"prompt": "a red circle"} only, or strings only.'
            raise InputError(where, value, hint)
        yield PromptRow(where, value if isinstance(value, dict) else {"prompt": value})


def _json_values(text: str, place: str) -> Iterator[tuple[str, object]]:
    if not text.lstrip().startswith("["):
        for number, line in _lines(text):
            yield f"{place}, line {number}", _parse_json(line, place, first_line=number)
        return
    items = _parse_json(text, place, first_line=1)
    assert isinstance(items, list), "JSON that begins with a bracket is an array"
    yield from ((f"{place}, item {number}", item) for number, item in enumerate(items, start=1))


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


def _refuse_quoted_tsv(text: str, place: str) -> None:
    """Refuse a TSV file that quotes its fields as CSV does: literal fields would keep the quotes."""
    # Every quotation mark belongs to a quoted field, and one of these needed its quotes, is empty, or is in the header.
    # So a prompt that is one quoted word keeps its quotes.
    if '"' in _QUOTED_FIELD.sub("", text):
        return
    fields = list(_QUOTED_FIELD.finditer(text))
    header = len(text.split("\n", 1)[0])
    if any(match.start() < header or not match[1] or re.search(r'["\t\r\n]', match[1]) for match in fields):
        hint = (
            "In a .tsv file every character stands for itself. Rename it to .csv, or write its fields without quotes."
        )
        raise InputError(place, "fields in quotes", hint)


def read_delimited(text: str, place: str, *, literal: bool) -> Iterator[PromptRow]:
    """Yield comma-separated or tab-separated records as text; an empty field is None.

    In TSV (`literal`) every character stands for itself; else fields may be in quotes, and a header with tabs and
    without commas has them between fields. InputError for a record of another length than the header, an unclosed
    quote, a column name that appears twice, and TSV with fields in quotes.
    """
    if literal:
        _refuse_quoted_tsv(text, place)
    header_line = text.split("\n", 1)[0]
    delimiter = "\t" if literal or ("\t" in header_line and "," not in header_line) else ","
    records = _records(text, place, delimiter, csv.QUOTE_NONE if literal else csv.QUOTE_MINIMAL)
    _, header = next(records, (0, []))
    names = [name.strip() for name in header]
    refuse_duplicate_columns(names, place)
    if len(names) == 1 and len(columns := names[0].split(";")) > 1:
        hint = (
            f"Its {len(columns)} columns are separated by semicolons. Write the file with {delimiter!r} between them."
        )
        raise InputError(f"{place}, line 1", names[0], hint)
    for number, cells in records:
        if len(cells) != len(names):
            raise InputError(
                f"{place}, line {number}",
                f"{len(cells)} fields",
                f"The header has {len(names)}: {', '.join(names)}. "
                + ("Put one tab between fields." if literal else f"Put quotes around a field with {delimiter!r}."),
            )
        values: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}
        yield PromptRow(f"{place}, line {number}", values)


def _records(text: str, place: str, delimiter: str, quoting: Literal[0, 3]) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank, with the line on which each begins."""
    # polars would fill short records up with nulls.
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    first = 1
    try:
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        hint = f"Not well-formed: {error}. Close every quote, and double a quote inside quotes."
        raise InputError(f"{place}, line {first}", "an unreadable record", hint) from None


def refuse_duplicate_columns(names: Sequence[str], place: str) -> None:
    """Raise InputError when a column name appears twice."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(place, ", ".join(duplicates), "A column name appears twice. Rename or remove one.")


def convert_numbers(rows: Sequence[PromptRow], *, text_columns: Callable[[str], bool]) -> None:
    """Convert columns of numbers and truth values of all files in place, except `text_columns`."""
    for name in {name for row in rows for name in row.values if not text_columns(name)}:
        filled = [row.values for row in rows if row.values.get(name) is not None]
        cells = [str(values[name]) for values in filled]
        if cells and {*cells} <= {"true", "false", "True", "False"}:
            converted: Sequence[object] = [cell.lower() == "true" for cell in cells]
        else:
            numbers = [_number(cell) for cell in cells]
            if None in numbers:
                continue
            kind = int if all(isinstance(number, int) for number in numbers) else float
            converted = [kind(number) for number in numbers if number is not None]
        for values, value in zip(filled, converted, strict=True):
            values[name] = value


def _number(cell: str) -> int | float | None:
    """Return the number of 64 bits that Python writes like the cell; None for text such as 007 or 1.50."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(cell)
            if repr(number) == cell and abs(number) < 2.0**63:
                return number
    return None


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "..."
