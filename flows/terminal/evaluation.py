"""What an evaluation found, in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from flows.evaluation.evaluate import EvaluateSummary
from flows.terminal.reward_table import reward_table
from flows.terminal.text import plain
from tasks.reports.text import counted, number

HEADINGS = ("reward", "mean", "std", "without", "failed")


def show_evaluation(summary: EvaluateSummary, console: Console | None = None) -> None:
    """Print each reward and guardrail, the held-out reward, and where the samples are."""
    console = console or Console(stderr=True)
    named = [*summary.rewards.items(), *((f"{label} (guardrail)", each) for label, each in summary.guardrails.items())]
    rows = [
        (label, number(each.mean), number(each.std), f"{each.without:,}", f"{each.failed:,}") for label, each in named
    ]
    title = f"{summary.run}, policy {summary.policy}, {counted(summary.samples, 'sample')}"
    console.print(reward_table(title, HEADINGS, rows, console))
    table = Table(title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("held-out reward", number(summary.heldout))
    table.add_row("policy digest", summary.policy_digest[:16])
    for name, seconds in summary.seconds.items():
        table.add_row(f"seconds, {name}", f"{seconds:.1f}")
    table.add_row("kept in", plain(summary.folder))
    if summary.stored:
        table.add_row("computed", "nothing: it was stored")
    console.print(table)
