"""A comparison of runs in the terminal: differences, curves, settings and the prompts that differ most."""

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.comparison.compare_runs import ComparedRuns
from flows.terminal.inspection import curve_blocks, prompt_text, show_warnings
from flows.terminal.tables import plain, reward_table, table_of
from tasks.reports.compare_page import difference_cells, difference_rows, run_rows, title_of, verdict
from tasks.reports.comparison import Comparison
from tasks.reports.text import number, one_line, sparkline

MAX_ROWS, MAX_SETTINGS = 10, 30
LETTERS, CURVE_WIDTH = 160, 16


def show_comparison(compared: ComparedRuns, html: Path | None, *, to_stderr: bool) -> None:
    """Print a comparison; if it was written as a page, without curves, settings and samples."""
    console, found = Console(stderr=to_stderr), compared.comparison
    show_warnings(compared.warnings, console)
    console.print(reward_table(title_of(found), run_rows(found), console))
    rows = [{**difference_cells(*each), "finding": verdict(each[2])} for each in difference_rows(found)]
    if rows:
        console.print(reward_table("Held-out differences, paired by prompt", rows, console))
    if html is None:
        if found.curves:
            console.print(_curves(found, console))
        if found.settings:
            console.print(_settings(found))
        if found.prompts:
            console.print(_prompts(found))
    if found.omissions:
        lines = Text("\n").join(plain(each) for each in found.omissions)
        console.print(Panel(lines, title="not compared", title_align="left"))
    if html is not None:
        console.print(plain(f"page written to {html}"), soft_wrap=True)


def _curves(found: Comparison, console: Console) -> Table:
    labels = [run.label for run in found.runs]
    table = table_of("Curves, with their last values", ("over iterations", *labels), ())
    for curve in found.curves:
        cells = []
        for label in labels:
            values = [value for _, value in curve.series.get(label, ())]
            last = f" {values[-1]:.4g}" if values else ""
            cells.append(Text(sparkline(values, CURVE_WIDTH, curve_blocks(console)) + last))
        table.add_row(plain(curve.title), *cells)
    return table


def _settings(found: Comparison) -> Table:
    shown = list(found.settings.items())[:MAX_SETTINGS]
    rows = [
        (path, *("not set" if each is None else one_line(each, LETTERS) for each in values)) for path, values in shown
    ]
    table = table_of("Settings that differ", ("setting", *(run.label for run in found.runs)), rows)
    if len(shown) < len(found.settings):
        table.caption = f"{len(shown)} of {len(found.settings)} settings; --html FILE shows all"
    return table


def _prompts(found: Comparison) -> Table:
    labels = list(found.prompts[0])
    table = table_of(f"Held-out prompts that differ most, {found.measure}", ("prompt", *labels), ())
    table.show_lines = True
    for groups in found.prompts[:MAX_ROWS]:
        cells = []
        for group in groups.values():
            output = group.samples[0]["output"]
            text = f"\n{one_line(output, LETTERS) or '(empty)'}" if isinstance(output, str) else ""
            cells.append(plain(number(group.reward) + text))
        table.add_row(prompt_text(groups[labels[0]]), *cells)
    if found.total > MAX_ROWS:
        table.caption = f"{MAX_ROWS} of {found.total} prompts; --html FILE shows more"
    return table
