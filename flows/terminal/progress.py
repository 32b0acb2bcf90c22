"""How far each stage of a run is: bars in a terminal, lines in a log."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
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
from rich.text import Text

from flows.terminal.output import plain, stderr
from tasks.progress import Lines, listen, show_run
from tasks.reports.text import duration


class _Rate(ProgressColumn):
    """Samples per second of a stage, seconds per iteration of the run."""

    def render(self, task: Task) -> Text:
        if "pace" in task.fields:
            pace = task.fields["pace"]
            return Text(f"{pace:.1f} s each" if pace else "", style="cyan")
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "", style="cyan")


class _Remaining(TimeRemainingColumn):
    """Estimated time that is left; of the run by its pace, since an iteration may take longer than Rich remembers."""

    def render(self, task: Task) -> Text:
        if "pace" not in task.fields:
            return super().render(task)
        pace, left = task.fields["pace"], (task.total or 0) - task.completed
        return Text(f"{duration(pace * left)} left" if pace and left else "", style="progress.remaining")


@contextmanager
def training_progress(console: Console | None = None) -> Iterator[None]:
    """Show how far a run is, by default on stderr: bars of its stages in a terminal; elsewhere lines for a log."""
    console = console or stderr()
    if not console.is_terminal:
        lines = Lines()
        listen(lines)
        show_run(lines.advance_run)
        yield
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        _Remaining(),
    )
    with Progress(*columns, console=console) as bars:
        shown = _Bars(bars)
        listen(shown)
        show_run(shown.advance_run)
        yield


class _Bars:
    """A bar for the run, and one for each running stage; finished ones are removed when another begins."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}
        self.run: TaskID | None = None
        # Rewards that are scored concurrently report from their own threads.
        self.lock = threading.Lock()

    def advance(self, stage: str, done: int, total: int) -> None:
        with self.lock:
            if stage not in self.tasks:
                ended = {task.id for task in self.bars.tasks if task.finished}
                for name in [name for name, task in self.tasks.items() if task in ended]:
                    self.bars.remove_task(self.tasks.pop(name))
                self.tasks[stage] = self.bars.add_task(stage, total=total)
            self.bars.update(self.tasks[stage], completed=done, total=total)

    def advance_run(self, done: int, total: int, pace: float | None) -> None:
        with self.lock:
            if self.run is None:
                self.run = self.bars.add_task("iterations of the run", pace=pace)
            self.bars.update(self.run, completed=done, total=total, pace=pace)

    def log(self, line: str) -> None:
        self.bars.console.print(plain(line), highlight=False)
