"""What the tables of all commands share: text that is data, key-value tables, tables of rewards."""

import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.reports.text import Cells, printable

NAME_WIDTH = 28
"""Characters of a reward's name on one line."""

UNLIMITED = 10_000
"""Characters across a console on which nothing folds."""


def stderr() -> Console:
    """Return a console on stderr; stdout is for `--json`."""
    return Console(stderr=True)


def plain(text: str) -> Text:
    """Return text that is data: no markup, and no control characters that a terminal would obey."""
    return Text(printable(text, keep="\n"))


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


def table_of(title: str, headings: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[int] = ()) -> Table:
    """Make a table whose cells are data and fold where they are too wide; `right` are columns of numbers."""
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        number = index in right
        table.add_column(heading, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def reward_table(title: str, rows: Sequence[Cells], console: Console) -> Table:
    """Make a table with a row per reward, or a list per reward, without empty cells, when the console is too narrow."""
    table = table_of(title, list(rows[0]), (row.values() for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    unlimited = console.options.update_width(UNLIMITED)
    if console.measure(table, options=unlimited).maximum <= console.width:
        return table
    # Headings fold between words, names fold anywhere, numbers do not fold.
    for index, (column, heading) in enumerate(zip(table.columns, rows[0], strict=True)):
        cells = max(len(row[heading]) for row in rows)
        column.width = max(cells if index else min(cells, NAME_WIDTH), *map(len, heading.split()))
    if console.measure(table, options=unlimited).maximum <= console.width:
        return table
    return _reward_lists(title, rows)


def _reward_lists(title: str, rows: Sequence[Cells]) -> Table:
    table = key_values(title, ())
    table.columns[0].overflow, table.columns[1].justify = "fold", "right"
    for row in rows:
        (_, name), *cells = row.items()
        label = plain(name)
        label.stylize("bold")
        table.add_row(label, "")
        for heading, cell in cells:
            if cell:
                table.add_row(f"  {heading}", plain(cell))
    return table
