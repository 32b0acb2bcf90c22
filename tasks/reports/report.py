"""A report: what a command did or found, put together once, whoever shows it.

flows/terminal/tables.py shows it in the terminal, `markdown_of` writes it for Prefect's UI and the model card, and the
macro `report` of templates/macros.html.jinja for pages. Everything in it is data: each of the three escapes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.reports.text import change, in_cell, markdown_table, number
from tasks.runs.run_view import RunSummary

Cells = dict[str, str]
"""A row of a table: its cells by heading, in the order of the columns."""

Fact = tuple[str, str]
"""The name of something, and its value."""


@dataclass(frozen=True)
class Table:
    """Rows under a title; without rows its note stands in their place, and without a note nothing at all.

    Attributes:
        title: heading of the table; empty for none.
        rows: all with the same headings. The first column names the row.
        texts: headings of further columns of words, which may fold; cells of the others are numbers, in one piece.
        meaning: what the columns mean, for readers of a page.
        note: a sentence below, such as how much is left out.
    """

    title: str
    rows: Sequence[Cells]
    texts: Sequence[str] = ()
    meaning: str = ""
    note: str = ""

    def head(self, count: int, noun: str) -> "Table":
        """Return the first rows, with a note of how many rows of this noun there are on the page."""
        if len(self.rows) <= count:
            return self
        return replace(
            self, rows=self.rows[:count], note=f"{count} of {len(self.rows)} {noun}; the page (--html FILE) shows all"
        )


@dataclass(frozen=True)
class Notice:
    """Sentences that a reader should see first, under a title."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Report:
    """A command's result, in the order in which it is shown: notices, tables, facts, notes.

    Attributes:
        title: what the report is of.
        facts: names and values.
        tables: what there is several of.
        notices: what is wrong or missing; one without lines is left out.
        notes: sentences at the end, or lines to copy.
    """

    title: str
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    notices: Sequence[Notice] = ()
    notes: Sequence[str] = ()


def markdown_of(report: Report) -> str:
    """Write a report as Markdown."""
    lines = [f"# {in_cell(report.title)}", ""] if report.title else []
    for notice in report.notices:
        if notice.lines:
            lines += [f"**{in_cell(notice.title)}**", "", *(f"- {in_cell(line)}" for line in notice.lines), ""]
    for table in report.tables:
        lines += [f"## {in_cell(table.title)}", ""] if table.title and (table.rows or table.note) else []
        if table.rows:
            headings = [in_cell(heading) for heading in table.rows[0]]
            lines += [*markdown_table(headings, [[*map(in_cell, row.values())] for row in table.rows]), ""]
        lines += [in_cell(table.note), ""] if table.note else []
    if report.facts:
        lines += [*markdown_table(("", ""), [[*map(in_cell, fact)] for fact in report.facts]), ""]
    for note in report.notes:
        lines += [in_cell(note), ""]
    return "\n".join(lines)


def reward_facts(run: RunSummary) -> list[Fact]:
    """List a run's reward, its held-out reward, and that of images that no policy made."""
    titles = {"blank": "held-out reward, blank images", "target": "held-out reward, the targets"}
    baselines = run.heldout_baselines
    return [
        ("reward, first → last iteration", change(run.reward_first, run.reward_last)),
        ("held-out reward, before → after", change(run.heldout_before, run.heldout_after)),
        *((title, number(baselines[name])) for name, title in titles.items() if name in baselines),
    ]


def seconds_facts(seconds: Mapping[str, float]) -> list[Fact]:
    """List the seconds of each stage."""
    return [(f"seconds, {stage}", f"{spent:.1f}") for stage, spent in seconds.items()]
