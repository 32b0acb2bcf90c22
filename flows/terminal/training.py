"""The summary of a training run in the terminal."""

import os

from rich.markup import escape
from rich.table import Table

from flows.terminal import progress
from flows.training.summary import TrainSummary


def show_summary(summary: TrainSummary) -> None:
    """The end of a run: rewards first and last, time a stage, where to look."""
    table = Table(title=f"{summary.run}: {summary.iterations} iterations", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("reward, first -> last iteration", _change(summary.reward_first, summary.reward_last))
    table.add_row("held-out reward, before -> after", _change(summary.heldout_before, summary.heldout_after))
    for stage, seconds in summary.seconds.items():
        table.add_row(f"seconds, {stage}", f"{seconds:.1f}")
    table.add_row("policy digest", (summary.policy_digest or "none")[:16])
    table.add_row("kept in", _shown(summary.folder))
    if summary.contact_sheet:
        table.add_row("images before and after", _shown(summary.contact_sheet))
    if summary.heldout_texts:
        table.add_row("completions before and after", _shown(summary.heldout_texts))
    if summary.watch:
        table.add_row("reward beside its guardrails", _shown(summary.watch))
    for sign in summary.hacking:
        table.add_row("stopped by the watch" if summary.stopped_early else "watch", escape(sign))
    for reason in (*summary.quarantined, *summary.previous):
        table.add_row("moved away", escape(reason))
    progress.console.print(table)


def _shown(path: str) -> str:
    """Shorter where it lies below the folder one is in."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "none"
    return f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"
