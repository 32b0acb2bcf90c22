"""What the tables of all commands share: text that is data, key-value tables, tables of rewards."""

import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PADDING = 3
"""Characters between two columns."""

NAME_WIDTH = 28
"""Characters of a reward's name on one line."""


def stderr() -> Console:
    """Return a console on stderr; stdout is for `--json`."""
    return Console(stderr=True)


def plain(text: str) -> Text:
    """Return text that is data: no markup, and no control characters that a terminal would obey."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text))


def relative(path: str) -> str:
    """Shorten a path below the working directory."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def key_values(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Make a table of names and values; both are data."""
    table = table_of(title, ("", ""), rows)
    table.show_header, table.box = False, box.SIMPLE
    table.columns[0].overflow = "ellipsis"
    return table


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """Make a table whose cells are data and fold where they are too wide.

    Args:
        title: title above the table.
        headings: headings of the columns.
        rows: cells of each row.
        right: columns of numbers, aligned to the right and never folded.
    """
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        number = index in right
        table.add_column(heading, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def reward_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> Table:
    """Make a table with one row per reward, or a list per reward when the terminal is too narrow.

    Args:
        title: title above the table.
        headings: headings of the columns, the first one the reward's.
        rows: cells of at least one row; empty cells are left out of a list.
        console: where it is printed.
    """
    first, *others = (max(len(row[column]) for row in rows) for column in range(len(headings)))
    widths = [min(first, NAME_WIDTH), *others]
    words = [max(len(word) for word in heading.split()) for heading in headings]
    if sum(max(pair) + PADDING for pair in zip(widths, words, strict=True)) > console.width:
        return _reward_lists(title, headings, rows)
    table = table_of(title, headings, rows)
    for index, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
        column.justify, column.min_width = "right" if index else "left", width
    return table


def _reward_lists(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = key_values(title, ())
    table.columns[0].overflow, table.columns[1].justify = "fold", "right"
    for name, *cells in rows:
        label = plain(name)
        label.stylize("bold")
        table.add_row(label, "")
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell:
                table.add_row(f"  {heading}", plain(cell))
    return table
