"""A run, or new samples, in the terminal: tables, sparklines, texts, and images if the terminal has enough colours."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.color import Color
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from flows.inspection.inspect_run import Inspection, heading
from flows.terminal.tables import key_values, plain, relative, table_of
from tasks.reports.groups import Group
from tasks.reports.images import PRUNED
from tasks.reports.metric_titles import metric_rows, metric_title
from tasks.reports.run_page import plotted_metrics, progress, stage_shares
from tasks.reports.samples import Row
from tasks.reports.text import ASCII_BLOCKS, SPARK_WIDTH, UNICODE_BLOCKS, change, number, one_line, signed, sparkline
from tasks.runs.run_view import RunView

if TYPE_CHECKING:
    from flows.sampling.sample import Sample

WIDE = 100
MAX_ROWS = 24
"""Prompts that are shown of everything there is; the page has more."""
SCREEN_ROWS, SCREEN_CURVES = 3, 8
"""Prompts of texts, of images without colours, and curves that fit on a screen."""
THUMBNAIL = 16
"""Characters across an image; each character is two pixels, one above the other."""

LETTERS = 400
"""Letters of a text that are shown; the page has all of it."""


def report(inspection: Inspection, html: Path | None, console: Console, *, everything: bool, config: bool) -> None:
    """Show a run on the console; if it was written as a page, only the summary and the path of the page."""
    if html is None:
        show_inspection(inspection, console, everything=everything, config=config)
        return
    show_warnings(inspection.warnings, console)
    show_heading(inspection, console)
    console.print(plain(f"page written to {html}"), soft_wrap=True)


def show_inspection(inspection: Inspection, console: Console, *, everything: bool, config: bool) -> None:
    """Print the summary, the main curves and some samples, which fit on a screen.

    Args:
        everything: print every curve and metric, more samples, and what was moved away.
        config: print the configuration with all defaults.
    """
    run, images = inspection.run, has_colours(console) and inspection.run.noun == "image"
    rows = MAX_ROWS if everything else 1 if images else SCREEN_ROWS
    show_warnings(inspection.warnings, console)
    show_heading(inspection, console)
    console.print(_curves(inspection, console, None if everything else SCREEN_CURVES))
    if inspection.heldout is not None and inspection.heldout.pairs:
        console.print(_heldout(inspection, console, rows))
    if inspection.groups.shown:
        console.print(_groups(inspection, console, rows))
    if everything:
        _show_rest(run, console)
    if config and run.config_text is not None:
        console.print(Panel(plain(run.config_text.rstrip()), title="config.yaml", title_align="left"))
    if not everything:
        hint = "--all shows every curve, metric and prompt, --config the configuration, --html FILE writes a page"
        console.print(Text(hint, style="dim"), soft_wrap=True)


def _show_rest(run: RunView, console: Console) -> None:
    if run.shown is not None:
        metrics = metric_rows(run.shown.metrics, run.noun, run.stream)
        rows = [(title, name, f"{value:.6g}") for title, _, name, value in metrics]
        headings = ("metric", "name in metrics.parquet", "value")
        console.print(table_of(f"Iteration {run.shown.iteration}: every metric", headings, rows, right=(2,)))
    if run.moved:
        rows = [(moved.reason, ", ".join(moved.paths), moved.place) for moved in run.moved]
        console.print(table_of("Quarantined and previous", ("why", "what", "where"), rows))


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what is damaged or missing in a panel."""
    if warnings:
        text = Text("\n").join(plain(warning) for warning in warnings)
        console.print(Panel(text, title="warning: not everything could be shown", border_style="yellow"))


def show_heading(inspection: Inspection, console: Console) -> None:
    """Print how far the run is, its rewards, and its time by stage."""
    run = inspection.run
    shares = ", ".join(f"{stage} {share:.0%}" for stage, _, share in stage_shares(run))
    rows = [*heading(inspection.summary(None)), *([("time by stage", shares)] if shares else [])]
    rows += [("started", str(run.starts[0]))] if run.starts else []
    console.print(key_values(f"{run.name}: {progress(run)}", [*rows, ("stored in", relative(run.folder))]))
    if inspection.verdict.finding == "signs":
        lines = Text("\n").join(plain(reason) for reason in inspection.verdict.reasons)
        console.print(Panel(lines, title="signs of reward hacking", border_style="yellow"))


def _curves(inspection: Inspection, console: Console, limit: int | None) -> Table:
    run = inspection.run
    wide = console.width >= WIDE
    headings = ("over iterations", "", "first", "last", *(("least", "most") if wide else ()))
    table = table_of("Curves", headings, (), right=range(2, len(headings)))
    table.columns[0].min_width, table.columns[1].no_wrap = 26, True
    by_dataset = {name: run.series(name) for name in run.dataset_rewards.values()}
    plotted = {name: run.series(name) for name in plotted_metrics(run)}
    shown = {"reward": run.series("reward"), "heldout_reward": run.heldout_series(), **by_dataset, **plotted}
    blocks = curve_blocks(console)
    for name, points in list(shown.items())[:limit]:
        values = [value for _, value in points]
        if values:
            columns = (values[0], values[-1], *((min(values), max(values)) if wide else ()))
            line = sparkline(values, SPARK_WIDTH if wide else SPARK_WIDTH - 8, blocks)
            table.add_row(
                plain(metric_title(name, run.noun, run.stream)[0]), line, *(f"{value:.4g}" for value in columns)
            )
    return table


def _heldout(inspection: Inspection, console: Console, limit: int) -> Table:
    heldout = inspection.heldout
    assert heldout is not None
    seeds = "same seeds" if heldout.same_seeds else "other seeds"
    title = f"Held-out prompts, policy {heldout.versions[0]} and policy {heldout.versions[-1]}, {seeds}"
    texts, images = inspection.run.noun == "completion", has_colours(console)
    table = table_of(title, ("prompt", "reward", *(("before", "after") if texts or images else ())), ())
    table.show_lines = images
    table.columns[0].ratio, table.columns[1].no_wrap = 1, True
    for column in table.columns[2:]:
        column.no_wrap, column.ratio = not texts, 1 if texts else None
    for before, after in heldout.pairs[:limit]:
        samples = (before.samples[0], after.samples[0])
        cells: list[RenderableType] = [prompt_text(before), change(before.reward, after.reward)]
        table.add_row(*cells, *(_output(sample) for sample in samples if texts or images))
    table.caption = _left_out(min(len(heldout.pairs), limit), heldout.total)
    return table


def _groups(inspection: Inspection, console: Console, limit: int) -> Table:
    groups, shown = inspection.groups, inspection.run.shown
    assert shown is not None
    title = f"Iteration {shown.iteration}: best and worst {inspection.run.noun} per prompt"
    table = table_of(title, ("prompt", "best", "worst"), ())
    table.show_lines = True
    for column, ratio in zip(table.columns, (2, 3, 3), strict=True):
        column.ratio = ratio
    for group in groups.shown[:limit]:
        first = group.samples[0]
        about = prompt_text(group)
        for name in groups.varying:
            about.append_text(Text("\n")).append_text(plain(first[name]))
        about.append("\nmean " + number(group.reward), "dim")
        if first["dropped"]:
            about.append(", left out of the update", "dim")
        table.add_row(about, *(_cell(sample, console) for sample in (group.best or first, group.worst)))
    replaced = groups.describe() if groups.rounds > 1 or groups.dropped else None
    table.caption = "\n".join(filter(None, (replaced, _left_out(min(len(groups.shown), limit), groups.total)))) or None
    return table


def curve_blocks(console: Console) -> str:
    """Return the characters of sparklines that the console can show."""
    return UNICODE_BLOCKS if console.encoding.lower().startswith("utf") else ASCII_BLOCKS


def prompt_text(group: Group) -> Text:
    """Return a prompt, shortened where its samples are texts."""
    first = group.samples[0]
    return plain(one_line(first["prompt"], LETTERS) if isinstance(first["output"], str) else first["prompt"])


def _cell(sample: Row | None, console: Console) -> RenderableType:
    if sample is None:
        return ""
    advantages = (f"{title} {signed(value)}" for title, value in sample["advantages"].items())
    lines = [plain(sample["sample_id"]), Text(f"reward {number(sample['reward'])}, {', '.join(advantages)}")]
    lines += [plain(f"{label} {number(value)}") for label, value in sample["breakdown"].items()]
    lines += [Text(f"{each.title} {each.value}", style="dim") for each in sample["actions"]]
    if isinstance(sample["output"], str):
        return Lines(_output(sample), *lines)
    return Lines(*lines, *((_output(sample),) if has_colours(console) else ()))


def _output(sample: Row) -> Text:
    output = sample["output"]
    if isinstance(output, str):
        shown = plain(one_line(output, LETTERS) or "(empty)")
        shown.stylize("bold")
        return shown
    return thumbnail(output) if output is not None else Text(PRUNED, style="dim")


def _left_out(shown: int, total: int) -> str | None:
    return f"{shown} of {total} prompts" if shown < total else None


def show_sample(sample: "Sample", console: Console) -> None:
    """Print what `grpo sample` made: the prompt with the text, or with the path of the image and the image itself."""
    console.print(plain(f"{sample.prompt} [{sample.index}]"), style="dim", soft_wrap=True)
    if sample.text is not None:
        console.print(plain(sample.text), soft_wrap=True, highlight=False)
    if sample.file is not None:
        console.print(plain(relative(sample.file)), soft_wrap=True, highlight=False)
        if has_colours(console):
            with Image.open(sample.file) as image:
                console.print(thumbnail(image.convert("RGB")))


def has_colours(console: Console) -> bool:
    """Return whether a console shows images."""
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
