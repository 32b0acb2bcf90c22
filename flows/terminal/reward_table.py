"""A table with a row a reward, as wide as it needs to be; where that is too wide, a list a reward."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from flows.terminal.text import plain

PADDING = 3
"""Characters that stand between two columns."""

NAME = 28
"""Characters of a reward's name that stand in one line."""


def reward_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> Table:
    """A table whose cells stand in one line each, names that are long aside.

    Args:
        title: above it.
        headings: of the columns, the first one the reward's.
        rows: cells, of one row at least; a cell that is empty is left out of a list.
        console: that it is to fit.
    """
    cells = _widths(rows)
    words = [max(len(word) for word in heading.split()) for heading in headings]
    needed = sum(max(pair) + PADDING for pair in zip(cells, words, strict=True))
    return _wide(title, headings, rows) if needed <= console.width else _narrow(title, headings, rows)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Of the columns: the longest cell's, of the first one at most so much that a name may fold."""
    first, *others = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    return [min(first, NAME), *others]


def _wide(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD)
    for column, (heading, width) in enumerate(zip(headings, _widths(rows), strict=True)):
        table.add_column(heading, justify="right" if column else "left", min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def _narrow(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=plain(title), title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, *cells in rows:
        label = plain(name)
        label.stylize("bold")
        table.add_row(label, "")
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell:
                table.add_row(f"  {heading}", plain(cell))
    return table
