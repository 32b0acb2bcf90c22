"""Reports as tables in the terminal."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from tasks.process import openable
from tasks.reports.report import Fact, Report, Table
from tasks.reports.text import printable

NAME_WIDTH = 28
"""Characters of a row's name on one line."""

UNLIMITED = 10_000
"""Characters across a console on which nothing folds."""

_STYLES = {"ok": "green", "problem": "red"}
"""Of a note's first word."""


def stderr() -> Console:
    """Return a console on stderr; stdout is for `--json`."""
    return Console(stderr=True)


def plain(text: str) -> Text:
    """Return text that is data: no markup, and no control characters that a terminal would obey."""
    return Text(printable(text, keep="\n"))


def show_report(report: Report, console: Console | None = None) -> None:
    """Print a report, by default on stderr."""
    console = console or stderr()
    for notice in report.notices:
        if notice.lines:
            lines = Text("\n").join(plain(openable(line)) for line in notice.lines)
            console.print(Panel(lines, title=plain(notice.title), border_style="yellow"))
    if report.title:
        console.print(plain(report.title), style="bold", soft_wrap=True)
    for table in report.tables:
        if table.rows:
            console.print(_table(table, console))
        elif table.note:
            console.print(plain(f"{table.title}: {table.note}" if table.title else table.note), soft_wrap=True)
    if report.facts:
        console.print(_facts("", report.facts))
    for note in report.notes:
        line, first = plain(openable(note)), note.partition(" ")[0]
        line.stylize(_STYLES.get(first, ""), 0, len(first))
        console.print(line, soft_wrap=True, highlight=False)


def table_of(
    title: str, headings: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[int] = ()
) -> RichTable:
    """Make a table whose cells are data and fold where they are too wide; `right` are columns of numbers."""
    table = RichTable(title=plain(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        number = index in right
        table.add_column(plain(heading), overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def _facts(title: str, facts: Iterable[Fact]) -> RichTable:
    table = table_of(title, ("", ""), facts)
    table.show_header, table.box = False, box.SIMPLE
    table.columns[0].overflow = "ellipsis"
    return table


def _table(table: Table, console: Console) -> RichTable:
    """Make a row per row, or where the console is too narrow for that, a list per row without empty cells."""
    headings = list(table.rows[0])
    shown = table_of(table.title, headings, (row.values() for row in table.rows))
    shown.caption, shown.caption_justify = plain(table.note) if table.note else None, "left"
    numbers = {heading for heading in headings[1:] if heading not in table.texts}
    for column, heading in zip(shown.columns, headings, strict=True):
        column.justify = "right" if heading in numbers else "left"
    unlimited = console.options.update_width(UNLIMITED)
    if console.measure(shown, options=unlimited).maximum <= console.width:
        return shown
    # Headings fold between words, names and texts fold anywhere, numbers do not fold.
    for index, (column, heading) in enumerate(zip(shown.columns, headings, strict=True)):
        cells = max(len(row[heading]) for row in table.rows)
        if heading in numbers or not index:
            column.width = max(cells if index else min(cells, NAME_WIDTH), *map(len, heading.split()), 1)
        else:
            column.min_width, shown.show_lines = min(cells, NAME_WIDTH), True
    if console.measure(shown, options=unlimited).minimum <= console.width:
        return shown
    return _lists(table)


def _lists(table: Table) -> RichTable:
    shown = _facts(table.title, ())
    shown.caption, shown.caption_justify = plain(table.note) if table.note else None, "left"
    shown.columns[0].overflow, shown.columns[1].justify = "fold", "left" if table.texts else "right"
    for row in table.rows:
        (_, name), *cells = row.items()
        label = plain(name)
        label.stylize("bold")
        shown.add_row(label, "")
        for heading, cell in cells:
            if cell:
                shown.add_row(f"  {heading}", plain(cell))
    return shown
