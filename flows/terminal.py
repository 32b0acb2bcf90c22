"""What a person sees of a training run in the terminal: bars on the way, a summary at the end."""

import sys
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
from tasks.progress import Listener, listen

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
        listen(_plain_lines())
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
        shown: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                for earlier in shown.values():
                    bars.update(earlier, visible=False)
                shown[stage] = bars.add_task(stage, total=total)
            bars.update(shown[stage], completed=done, total=total)

        listen(advance)
        yield


def _plain_lines() -> Listener:
    begun: dict[str, float] = {}

    def tell(stage: str, done: int, total: int) -> None:
        begun.setdefault(stage, time.perf_counter())
        if done == total:
            print(f"{stage}: {done}/{total} in {time.perf_counter() - begun[stage]:.1f} s", file=sys.stderr, flush=True)

    return tell


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
    table.add_row("kept in", summary.folder)
    if summary.contact_sheet:
        table.add_row("pictures before and after", summary.contact_sheet)
    _console.print(table)


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
