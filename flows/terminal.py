"""What a person sees of a training run in the terminal: bars on the way, a summary at the end."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
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
from rich.table import Table
from rich.text import Text

from flows.doctor import Diagnosis
from flows.summary import TrainSummary
from tasks.progress import listen

_console = Console(stderr=True)


class _Rate(ProgressColumn):
    """Units a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "", style="cyan")


@contextmanager
def training_progress() -> Iterator[None]:
    """Show how far each stage is: a bar in a terminal, a line when a stage ends elsewhere."""
    if not _console.is_terminal:
        listen(_Lines())
        yield
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console) as bars:
        listen(_Bars(bars))
        yield


class _Bars:
    """A bar for each stage that is at work; those that are done make room when another begins."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}
        # Rewards that are scored side by side tell from threads of their own.
        self.telling = threading.Lock()

    def advance(self, stage: str, done: int, total: int) -> None:
        with self.telling:
            if stage not in self.tasks:
                ended = {task.id for task in self.bars.tasks if task.finished}
                for name in [name for name, task in self.tasks.items() if task in ended]:
                    self.bars.remove_task(self.tasks.pop(name))
                self.tasks[stage] = self.bars.add_task(stage, total=total)
            self.bars.update(self.tasks[stage], completed=done, total=total)

    def announce(self, line: str) -> None:
        self.bars.console.print(line, markup=False, highlight=False)


class _Lines:
    """A line when a stage ends, for logs."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def advance(self, stage: str, done: int, total: int) -> None:
        begun = self.begun.setdefault(stage, time.perf_counter())
        if done == total:
            self.announce(f"{stage}: {done}/{total} in {time.perf_counter() - begun:.1f} s")

    def announce(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


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
        table.add_row("pictures before and after", _shown(summary.contact_sheet))
    if summary.heldout_texts:
        table.add_row("completions before and after", _shown(summary.heldout_texts))
    if summary.watch:
        table.add_row("reward beside its guardrails", _shown(summary.watch))
    for sign in summary.hacking:
        table.add_row("stopped by the watch" if summary.stopped_early else "watch", escape(sign))
    for reason in summary.set_aside:
        table.add_row("set aside", escape(reason))
    _console.print(table)


def _shown(path: str) -> str:
    """Shorter where it lies below the folder one is in."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "none"
    return f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Each finding with its mend, and the memory estimate part by part."""
    for finding in diagnosis.findings:
        mark = "[green]ok  [/]" if finding.healthy else "[red]mend[/]"
        _console.print(f"{mark} [bold]{finding.subject}[/]: {escape(finding.said)}", highlight=False, soft_wrap=True)
        if finding.mend:
            _console.print(f"     {escape(finding.mend)}", highlight=False, soft_wrap=True)
    if diagnosis.memory is not None:
        table = Table(title="GPU memory, estimated", title_justify="left")
        table.add_column("part")
        table.add_column("GiB", justify="right")
        table.add_column("from")
        for part, gib, formula in diagnosis.memory.rows():
            table.add_row(part, f"{gib:.2f}" if gib >= 0.01 else f"{gib:.2g}", formula)
        _console.print(table)
