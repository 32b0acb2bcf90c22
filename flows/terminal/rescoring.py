"""What changed when rollouts were scored again, in the terminal."""

import polars as pl
from rich import box
from rich.console import Console
from rich.table import Table

from flows.rescoring.rescore import RescoreSummary
from flows.terminal.reward_table import reward_table
from flows.terminal.text import plain
from tasks.reports.rescoring import HEADINGS, RescoringComparison, advantage_rows, reward_rows
from tasks.reports.text import counted, number, one_line

LETTERS = 60


def show_comparison(comparison: RescoringComparison, moved: pl.DataFrame, console: Console) -> None:
    """Print means, spread, order, advantages, and the samples whose rank moved most."""
    size = f"{counted(comparison.samples, 'sample')} in {counted(comparison.groups, 'group')}"
    rows = list(reward_rows(comparison))
    console.print(reward_table(f"Rewards before → after, {size}", HEADINGS, rows, console))
    advantages = Table(title="Advantages", title_justify="left", show_header=False, box=box.SIMPLE)
    for row in advantage_rows(comparison.advantages):
        advantages.add_row(*row)
    console.print(advantages)
    console.print(_moved(moved) if moved.height else "No sample's rank moved.", highlight=False)


def show_computed(summary: RescoreSummary, console: Console) -> None:
    """Print what was computed for it, how long that took, and where the page is."""
    table = Table(title=plain(f"Computed for {summary.name}"), title_justify="left", show_header=False, box=box.SIMPLE)
    for label, count in summary.computed.items():
        failed = summary.failed[label]
        said = counted(count, "sample") if count else "nothing: every score was stored"
        table.add_row(plain(label), f"{said}; {failed:,} could not be scored" if failed else said)
    for name, seconds in summary.seconds.items():
        table.add_row(f"seconds, {name}", f"{seconds:.1f}")
    for page in summary.report:
        table.add_row("page", plain(page))
    console.print(table)


def _moved(moved: pl.DataFrame) -> Table:
    table = Table(title="Samples whose rank moved most", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rank in group", no_wrap=True)
    table.add_column("reward", no_wrap=True)
    table.add_column("sample", overflow="fold")
    table.add_column("prompt", overflow="fold", ratio=1)
    several = moved["run"].n_unique() > 1
    for row in moved.iter_rows(named=True):
        name = f"{row['run']} {row['sample_id']}" if several else row["sample_id"]
        table.add_row(
            f"{row['rank_before']:g} → {row['rank_after']:g} of {row['siblings']}",
            f"{number(row['reward_before'])} → {number(row['reward_after'])}",
            plain(name),
            plain(one_line(row["prompt"], LETTERS)),
        )
    return table
