"""CSV and TSV files -> rows; columns of numbers and truth values become such where nothing is lost."""

import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence

from grpo_core.errors import InputError
from tasks.prompts.text import PromptRow

_QUOTED_FIELD = re.compile(r'(?:(?<=[\t\r\n])|\A)"((?:[^"]|"")*+)"(?=[\t\r\n]|\Z)')


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


def read_delimited(text: str, place: str, *, delimiter: str) -> Iterator[PromptRow]:
    """Yield comma-separated or tab-separated records as text; an empty field is None.

    Raises:
        InputError: a record of another length than the header, an unclosed quote, or a column name that appears twice.
    """
    quoted = delimiter == "," or _is_quoted_tsv(text)
    records = _records(text, place, delimiter, quoted)
    _, header = next(records, (0, []))
    names = [name.strip() for name in header]
    refuse_duplicate_columns(names, place)
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


def refuse_duplicate_columns(names: Sequence[str], place: str) -> None:
    """Raise InputError when a column name appears twice."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(place, ", ".join(duplicates), "A column name appears twice. Rename or remove one.")


def convert_numbers(rows: Sequence[PromptRow], *, text_columns: Callable[[str], bool]) -> None:
    """Convert columns of numbers and truth values in place; the others stay text.

    Args:
        rows: those of all files of a set, so that a column has one type.
        text_columns: whether a column stays text even where every cell looks like a number.
    """
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
