"""Rewards in the terminal: the list of them, what stored scores are worth, and what a rescoring changed."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.terminal.summaries import size
from flows.terminal.tables import key_values, plain, relative, reward_table, stderr, table_of
from grpo_core.rewards.reward import Reward
from tasks.reports import rescoring
from tasks.reports.reward_page import agreement_rows, findings, reward_rows
from tasks.reports.statistics import Statistics
from tasks.reports.text import counted, number, one_line

if TYPE_CHECKING:
    from flows.rescoring.rescore import RescoreSummary, Rescoring
    from flows.rewards.analysis import AnalysisSummary
    from grpo_core.rewards.weights.source import Weights

MAX_PAIRS = 12
PROMPT_LETTERS = 60


def show_rewards(rewards: Mapping[str, type[Reward]], console: Console) -> None:
    """Print each reward with what its value means, and its settings with their defaults."""
    rows = []
    for name, kind in rewards.items():
        settings = [f"{each.name}={each.default!r}" for each in inspect.signature(kind).parameters.values()]
        meaning = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append((name, meaning, ", ".join(settings)))
    table = table_of("Rewards", ("reward", "value", "settings"), rows)
    table.show_lines = True
    console.print(table)


def show_downloads(missing: Mapping["Weights", str], console: Console) -> None:
    """Print what would be downloaded for which reward: size, licence, address, and where it goes."""
    rows, total = [], 0
    for weights, reward in missing.items():
        bytes_, source = weights.size(), str(weights.source)
        total += bytes_ or 0
        address, target = (source, "the Hub's cache") if weights.on_hub else (weights.published.url, source)
        licence = weights.published.licence or "see its page"
        rows.append((reward, "unknown" if bytes_ is None else size(bytes_), licence, address, target))
    table = table_of("To download", ("reward", "size", "licence", "from", "to"), rows)
    table.caption = f"{size(total)} in total"
    console.print(table)


def show_fetched(fetched: Mapping["Weights", str], console: Console) -> None:
    """Print the settings of each reward that name its weights."""
    rows = [(reward, f"{weights.setting}: {weights.source}") for weights, reward in fetched.items()]
    console.print(key_values("Here; in the settings of the rewards" if rows else "These rewards need no weights", rows))


def show_analysis(analysis: Statistics, console: Console) -> None:
    """Print what stands out, the metrics of each reward, and how far the rewards agree."""
    found = findings(analysis)
    if found:
        lines = Text("\n").join(plain(f"{subject} {text}") for subject, text in found)
        console.print(Panel(lines, title="check before training on these", border_style="yellow"))
    size = f"{counted(analysis['samples'], 'sample')} in {counted(analysis['groups'], 'group')}"
    console.print(reward_table(f"Rewards, {size}", list(reward_rows(analysis)), console))
    if analysis["agreements"]:
        pairs = list(agreement_rows(analysis))
        table = reward_table("Agreement between rewards", pairs[:MAX_PAIRS], console)
        if len(pairs) > MAX_PAIRS:
            table.caption = f"{MAX_PAIRS} of {len(pairs)} pairs; the page shows all"
        console.print(table)


def show_notes(summary: "AnalysisSummary", console: Console) -> None:
    """Print signs of reward hacking, which rewards could not be scored again, and where the page and plots are."""
    rows = [
        *(("guardrail fell", sign) for sign in summary.fallen),
        *((label, f"was not scored again: {reason}") for label, reason in summary.not_repeated.items()),
        ("page and plots", relative(summary.folder)),
    ]
    console.print(key_values("", rows))


def show_rescoring(done: "Rescoring") -> None:
    """Print what a rescoring changed, and what was computed for it."""
    console = stderr()
    show_comparison(done.comparison, done.moved, console)
    show_computed(done.summary, console)


def show_comparison(comparison: Statistics, moved: pl.DataFrame, console: Console) -> None:
    """Print means, spread, order, advantages, and the samples whose rank moved most."""
    size = f"{counted(comparison['samples'], 'sample')} in {counted(comparison['groups'], 'group')}"
    rows = list(rescoring.reward_rows(comparison))
    console.print(reward_table(f"Rewards before → after, {size}", rows, console))
    console.print(key_values("Advantages", rescoring.advantage_rows(comparison["advantages"])))
    console.print(_moved(moved) if moved.height else "No sample's rank moved.", highlight=False)


def show_computed(summary: "RescoreSummary", console: Console) -> None:
    """Print what was computed, how long it took, and where the page is."""
    rows = []
    for label, count in summary.computed.items():
        failed = summary.failed[label]
        computed = counted(count, "sample") if count else "nothing: every score was stored"
        rows.append((label, f"{computed}; {failed:,} could not be scored" if failed else computed))
    rows += [(f"seconds, {name}", f"{seconds:.1f}") for name, seconds in summary.seconds.items()]
    rows += [("page", relative(page)) for page in summary.report]
    console.print(key_values(f"Computed for {summary.name}", rows))


def _moved(moved: pl.DataFrame) -> Table:
    several = moved["run"].n_unique() > 1
    rows = [
        (
            f"{row['rank_before']:g} → {row['rank_after']:g} of {row['siblings']}",
            f"{number(row['reward_before'])} → {number(row['reward_after'])}",
            f"{row['run']} {row['sample_id']}" if several else row["sample_id"],
            one_line(row["prompt"], PROMPT_LETTERS),
        )
        for row in moved.iter_rows(named=True)
    ]
    return table_of("Samples whose rank moved most", ("rank in group", "reward", "sample", "prompt"), rows)
