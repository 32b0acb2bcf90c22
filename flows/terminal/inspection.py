"""A run in the terminal: tables, sparklines, texts, and small images if the terminal has enough colors."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from rich import box
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from flows.inspection.inspect_run import Inspection, heading
from flows.terminal.tables import key_values, plain, relative, table_of
from tasks.reports.images import PRUNED
from tasks.reports.metric_titles import PLOTTED, metric_rows, metric_title, reward_means
from tasks.reports.run_page import progress, stage_shares
from tasks.reports.samples import GroupView, SampleView
from tasks.reports.text import (
    ASCII_BLOCKS,
    SPARK_WIDTH,
    UNICODE_BLOCKS,
    change,
    number,
    one_line,
    signed,
    sparkline,
)

WIDE = 100
MAX_ROWS = 24
THUMBNAIL = 16
"""Characters across an image; each character is two pixels, one above the other."""

LETTERS = 400
"""Letters of a text that are shown; the page has all of it."""


def report(inspection: Inspection, html: Path | None, *, to_stderr: bool) -> None:
    """Show a run on the console; if it was written as a page, only the summary and the path of the page."""
    console = Console(stderr=to_stderr)
    if html is None:
        show_inspection(inspection, console)
        return
    show_warnings(inspection.warnings, console)
    show_heading(inspection, console)
    console.print(plain(f"page written to {html}"), soft_wrap=True)


def show_inspection(inspection: Inspection, console: Console) -> None:
    """Print everything: summary, curves, samples, metrics, what was moved away."""
    run = inspection.run
    show_warnings(inspection.warnings, console)
    show_heading(inspection, console)
    console.print(_curves(inspection, console))
    if inspection.heldout is not None and inspection.heldout.pairs:
        console.print(_heldout(inspection, console))
    if inspection.groups.shown:
        console.print(_groups(inspection, console))
    if run.shown is not None:
        console.print(_metrics(inspection))
    if run.moved:
        rows = [(moved.reason, ", ".join(moved.paths), moved.place) for moved in run.moved]
        console.print(table_of("Quarantined and previous", ("why", "what", "where"), rows))
    console.print(_configuration(inspection))


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what is damaged or missing in a panel."""
    if warnings:
        text = Text("\n").join(plain(warning) for warning in warnings)
        console.print(Panel(text, title="warning: not everything could be shown", border_style="yellow"))


def show_heading(inspection: Inspection, console: Console) -> None:
    """Print how far the run is, its rewards, and its time by stage."""
    run = inspection.run
    rows = [*heading(inspection.summary(None))]
    rows += [(f"seconds, {stage}", f"{seconds:.1f} ({share:.0%})") for stage, seconds, share in stage_shares(run)]
    console.print(key_values(f"{run.name}: {progress(run)}", [*rows, ("stored in", relative(run.folder))]))


def _curves(inspection: Inspection, console: Console) -> Table:
    run = inspection.run
    wide = console.width >= WIDE
    table = Table(title="Curves", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("over iterations", overflow="fold", min_width=26)
    table.add_column("", no_wrap=True)
    for name in ("first", "last", *(("least", "most") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    series = {
        name: run.series(name) for name in ["reward", *reward_means(view.metrics for view in run.iterations), *PLOTTED]
    }
    by_dataset = {name: run.series(name) for name in run.dataset_rewards.values()}
    shown = {"reward": series.pop("reward"), "heldout_reward": run.heldout_series(), **by_dataset, **series}
    blocks = UNICODE_BLOCKS if console.encoding.lower().startswith("utf") else ASCII_BLOCKS
    for name, points in shown.items():
        values = [value for _, value in points]
        if values:
            columns = (values[0], values[-1], *((min(values), max(values)) if wide else ()))
            line = sparkline(values, SPARK_WIDTH if wide else SPARK_WIDTH - 8, blocks)
            table.add_row(plain(metric_title(name, run.noun).title), line, *(f"{value:.4g}" for value in columns))
    return table


def _heldout(inspection: Inspection, console: Console) -> Table:
    heldout = inspection.heldout
    assert heldout is not None
    seeds = "same seeds" if heldout.same_seeds else "other seeds"
    title = f"Held-out prompts, policy {heldout.first} and policy {heldout.last}, {seeds}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_lines=_has_colours(console))
    table.add_column("prompt", overflow="fold", ratio=1)
    table.add_column("reward", no_wrap=True)
    texts, images = inspection.run.noun == "completion", _has_colours(console)
    if texts or images:
        table.add_column("before", no_wrap=not texts, overflow="fold", ratio=1 if texts else None)
        table.add_column("after", no_wrap=not texts, overflow="fold", ratio=1 if texts else None)
    for before, after in heldout.pairs[:MAX_ROWS]:
        requested = plain(one_line(before.prompt, LETTERS)) if texts else plain(before.prompt)
        cells: list[RenderableType] = [requested, change(before.reward, after.reward)]
        if texts or images:
            cells += [_output(before.samples[0]), _output(after.samples[0])]
        table.add_row(*cells)
    table.caption = _left_out(len(heldout.pairs), heldout.total)
    return table


def _groups(inspection: Inspection, console: Console) -> Table:
    groups, shown = inspection.groups, inspection.run.shown
    assert shown is not None
    table = Table(
        title=f"Iteration {shown.iteration}: best and worst {inspection.run.noun} per prompt",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.show_lines = True
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("best", overflow="fold", ratio=3)
    table.add_column("worst", overflow="fold", ratio=3)
    for group in groups.shown[:MAX_ROWS]:
        table.add_row(_about(group, groups.datasets), *(_cell(sample, console) for sample in _ends(group)))
    replaced = groups.describe() if groups.rounds > 1 or groups.dropped else None
    table.caption = "\n".join(filter(None, (replaced, _left_out(len(groups.shown), groups.total)))) or None
    return table


def _ends(group: GroupView) -> Iterator[SampleView | None]:
    yield group.best or group.samples[0]
    yield group.worst


def _about(group: GroupView, datasets: Sequence[str]) -> Text:
    texts = isinstance(group.samples[0].output, str)
    about = Text.assemble(plain(one_line(group.prompt, LETTERS) if texts else group.prompt))
    if len(datasets) > 1:
        about.append_text(Text("\n")).append_text(plain(group.dataset))
    about.append("\nmean " + number(group.reward), "dim")
    return about.append(", left out of the update", "dim") if group.dropped else about


def _cell(sample: SampleView | None, console: Console) -> RenderableType:
    if sample is None:
        return ""
    lines = [plain(sample.sample_id), Text(f"reward {number(sample.reward)}, advantage {signed(sample.advantage)}")]
    lines += [plain(f"{label} {number(value)}") for label, value in sample.breakdown.items()]
    cut = "" if sample.finished else ", truncated"
    lines.append(Text(f"log-prob {sample.logprob:.1f} over {sample.length} tokens{cut}", style="dim"))
    if isinstance(sample.output, str):
        return Group(_output(sample), *lines)
    return Group(*lines, *((_output(sample),) if _has_colours(console) else ()))


def _output(sample: SampleView) -> Text:
    if isinstance(sample.output, str):
        shown = plain(one_line(sample.output, LETTERS) or "(empty)")
        shown.stylize("bold")
        return shown
    return thumbnail(sample.output) if sample.output is not None else Text(PRUNED, style="dim")


def _left_out(read: int, total: int) -> str | None:
    shown = min(read, MAX_ROWS)
    return f"{shown} of {total} prompts; --html FILE shows more" if shown < total else None


def _metrics(inspection: Inspection) -> Table:
    shown = inspection.run.shown
    assert shown is not None
    metrics = metric_rows(shown.metrics, inspection.run.noun)
    rows = [(title, name, f"{value:.6g}") for title, _, name, value in metrics]
    headings = ("metric", "name in metrics.parquet", "value")
    return table_of(f"Iteration {shown.iteration}: every metric", headings, rows, right=(2,))


def _configuration(inspection: Inspection) -> RenderableType:
    text = inspection.run.config_text
    return Panel(plain(text.rstrip()), title="config.yaml", title_align="left") if text is not None else ""


def _has_colours(console: Console) -> bool:
    return console.is_terminal and console.color_system in ("256", "truecolor")


def thumbnail(image: Image.Image, across: int = THUMBNAIL) -> Text:
    """Convert an image to half blocks: the upper pixel is the character's colour, the lower one its background."""
    down = max(2, 2 * round(across * image.height / image.width / 2))
    small = image.resize((across, down), Image.Resampling.BOX)
    text = Text(no_wrap=True)
    for y in range(0, down, 2):
        for x in range(across):
            upper, lower = (Color.from_rgb(*_pixel(small, x, y + offset)) for offset in (0, 1))
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n" if y + 2 < down else "")
    return text


def _pixel(image: Image.Image, x: int, y: int) -> tuple[int, int, int]:
    value = image.getpixel((x, y))
    assert isinstance(value, tuple), "images are RGB"
    return int(value[0]), int(value[1]), int(value[2])
