"""Which rewards there are and what each is worth, in the terminal."""

import inspect
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.rewards.analysis import AnalysisSummary
from flows.terminal.reward_table import reward_table
from flows.terminal.text import plain
from grpo_core.rewards.reward import Reward
from tasks.reports.reward_analysis import RewardAnalysis
from tasks.reports.reward_page import HEADINGS, PAIR_HEADINGS, agreement_rows, findings, reward_rows
from tasks.reports.text import counted

MAX_PAIRS = 12


def show_analysis(analysis: RewardAnalysis, console: Console) -> None:
    """Print what stands out, each reward's metrics, and how far the rewards agree."""
    found = findings(analysis)
    if found:
        lines = Text("\n").join(plain(f"{finding.subject} {finding.text}") for finding in found)
        console.print(Panel(lines, title="worth a look before training on these", border_style="yellow"))
    size = f"{counted(analysis.samples, 'sample')} in {counted(analysis.groups, 'group')}"
    console.print(reward_table(f"Rewards, {size}", HEADINGS, list(reward_rows(analysis)), console))
    if analysis.agreements:
        pairs = list(agreement_rows(analysis))
        table = reward_table("Agreement between rewards", PAIR_HEADINGS, pairs[:MAX_PAIRS], console)
        if len(pairs) > MAX_PAIRS:
            table.caption = f"{MAX_PAIRS} of {len(pairs)} pairs; the page shows all"
        console.print(table)


def show_notes(summary: AnalysisSummary, console: Console) -> None:
    """Print what the watch says, what could not be asked again, and where the page and the plots are."""
    table = Table(show_header=False, box=box.SIMPLE)
    for sign in summary.watch:
        table.add_row("watch", plain(sign))
    for label, reason in summary.not_repeated.items():
        table.add_row(plain(label), plain(f"was not asked again: {reason}"))
    table.add_row("page and plots", plain(summary.folder))
    console.print(table)


def show_rewards(rewards: Mapping[str, type[Reward]], console: Console) -> None:
    """Print each reward with what its value means, and its settings with their defaults."""
    table = Table(title="Rewards", title_justify="left", box=box.SIMPLE_HEAD, show_lines=True)
    for heading in ("reward", "value", "settings"):
        table.add_column(heading, overflow="fold")
    for name, kind in rewards.items():
        settings = [f"{each.name}={each.default!r}" for each in inspect.signature(kind).parameters.values()]
        meaning = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        table.add_row(name, plain(meaning), plain(", ".join(settings)))
    console.print(table)
