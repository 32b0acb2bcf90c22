"""What `grpo prune` deleted and kept, in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from flows.pruning.prune import PrunedRun, PruneSummary
from flows.terminal.text import plain

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_pruned(summary: PruneSummary, console: Console) -> None:
    """Print what was deleted and what was kept with the reason, run by run."""
    for run in summary.runs:
        _show_run(run, summary.dry_run, console)
    if not summary.schedules:
        said = "no Prefect server is configured (PREFECT_API_URL), so no schedule was asked what it needs"
        console.print(plain(said), soft_wrap=True)
    if summary.dry_run:
        console.print("a dry run: nothing was changed", highlight=False)


def _show_run(run: PrunedRun, dry_run: bool, console: Console) -> None:
    verb = "would be deleted" if dry_run else "deleted"
    table = Table(title=plain(f"{run.run}: {verb}"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what", overflow="fold")
    table.add_column("how many", justify="right", no_wrap=True)
    table.add_column("frees", justify="right", no_wrap=True)
    for each in run.deleted:
        table.add_row(each.kind, f"{each.count:,}", size(each.bytes))
    if not run.deleted:
        table.add_row("nothing", "0", size(0))
    console.print(table)
    if run.kept:
        kept = Table(title="kept", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("what", "which", "why"):
            kept.add_column(name, overflow="fold")
        for one in run.kept:
            kept.add_row(one.kind, plain(", ".join(one.names)), plain(one.reason))
        console.print(kept)
    for note in run.notes:
        console.print(plain(f"{run.run}: {note}"), soft_wrap=True)


def size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"
