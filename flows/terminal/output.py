"""Reports as tables in the terminal, and how far each stage is: bars, or lines in a log."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from tasks.progress import Lines, listen, show_run
from tasks.reports.report import Fact, Report, Table
from tasks.reports.text import duration, printable

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
            lines = Text("\n").join(plain(line) for line in notice.lines)
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
        line, first = plain(note), note.partition(" ")[0]
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
    shown.caption = plain(table.note) if table.note else None
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
    shown.caption = plain(table.note) if table.note else None
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


class _Rate(ProgressColumn):
    """Samples per second of a stage, seconds per iteration of the run."""

    def render(self, task: Task) -> Text:
        if "pace" in task.fields:
            pace = task.fields["pace"]
            return Text(f"{pace:.1f} s each" if pace else "", style="cyan")
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "", style="cyan")


class _Remaining(TimeRemainingColumn):
    """Estimated time that is left; of the run by its pace, since an iteration may take longer than Rich remembers."""

    def render(self, task: Task) -> Text:
        if "pace" not in task.fields:
            return super().render(task)
        pace, left = task.fields["pace"], (task.total or 0) - task.completed
        return Text(f"{duration(pace * left)} left" if pace and left else "", style="progress.remaining")


@contextmanager
def training_progress(console: Console | None = None) -> Iterator[None]:
    """Show how far each stage is, by default on stderr: a bar in a terminal; elsewhere one line when it ends."""
    console = console or stderr()
    if not console.is_terminal:
        listen(Lines())
        yield
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        _Remaining(),
    )
    with Progress(*columns, console=console) as bars:
        shown = _Bars(bars)
        listen(shown)
        show_run(shown.advance_run)
        yield


class _Bars:
    """A bar for the run, and one for each running stage; finished ones are removed when another begins."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}
        self.run: TaskID | None = None
        # Rewards that are scored concurrently report from their own threads.
        self.lock = threading.Lock()

    def advance(self, stage: str, done: int, total: int) -> None:
        with self.lock:
            if stage not in self.tasks:
                ended = {task.id for task in self.bars.tasks if task.finished}
                for name in [name for name, task in self.tasks.items() if task in ended]:
                    self.bars.remove_task(self.tasks.pop(name))
                self.tasks[stage] = self.bars.add_task(stage, total=total)
            self.bars.update(self.tasks[stage], completed=done, total=total)

    def advance_run(self, done: int, total: int, pace: float | None) -> None:
        with self.lock:
            if self.run is None:
                self.run = self.bars.add_task("iterations of the run", pace=pace)
            self.bars.update(self.run, completed=done, total=total, pace=pace)

    def log(self, line: str) -> None:
        self.bars.console.print(line, markup=False, highlight=False)
