"""Curves and samples of one run or several in the terminal: sparklines, texts, and images if it has enough colours."""

from typing import TYPE_CHECKING

from PIL import Image
from rich.color import Color
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.panel import Panel
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from flows.terminal.output import plain, show_report, table_of
from grpo_core.rollouts.messages import shown_question
from tasks.reports.groups import Group, Groups, Row
from tasks.reports.images import PRUNED
from tasks.reports.report import Report, Table
from tasks.reports.run_page import Heldout, plotted_metrics
from tasks.reports.text import (
    ASCII_BLOCKS,
    SPARK_WIDTH,
    TRUNCATED,
    UNICODE_BLOCKS,
    change,
    metric_rows,
    metric_title,
    number,
    one_line,
    relative,
    signed,
    sparkline,
)
from tasks.runs.run_view import RunView

if TYPE_CHECKING:
    from tasks.reports.comparison import Comparison

WIDE = 100
MAX_ROWS = 24
"""Prompts that are shown of everything there is; the page has more."""
SCREEN_ROWS, SCREEN_CURVES = 3, 8
"""Prompts of texts, of images without colours, and curves that fit on a screen."""
THUMBNAIL = 16
"""Characters across an image; each character is two pixels, one above the other."""

LETTERS = 400
"""Letters of a text that are shown; the page has all of it."""

COMPARED_PROMPTS, COMPARED_LETTERS, COMPARED_CURVE = 10, 160, 16
"""Prompts of a comparison of runs, letters of each text, and characters of a curve."""


def show_run(
    run: RunView, groups: Groups, heldout: Heldout | None, console: Console, *, everything: bool, config: bool
) -> None:
    """Print the main curves and some samples of a run, which fit on a screen, or everything; and its configuration."""
    rows = MAX_ROWS if everything else 1 if run.noun == "image" and has_colours(console) else SCREEN_ROWS
    console.print(_curves(run, console, None if everything else SCREEN_CURVES))
    if heldout is not None and heldout.pairs:
        console.print(_heldout(run, heldout, console, rows))
    if groups.shown:
        console.print(_groups(run, groups, console, rows))
    if everything:
        show_report(_rest(run), console)
    if config and run.config_text is not None:
        console.print(Panel(plain(run.config_text.rstrip()), title="config.yaml", title_align="left"))
    if not everything:
        hint = "--all shows every curve, metric and prompt, --config the configuration, --html FILE writes a page"
        console.print(Text(hint, style="dim"), soft_wrap=True)


def _rest(run: RunView) -> Report:
    shown = run.shown
    metrics = [] if shown is None else metric_rows(shown.metrics, run.noun, run.stream, run.trained_on)
    rows = [
        {"metric": title, "name in metrics.parquet": name, "value": f"{value:.6g}"} for title, _, name, value in metrics
    ]
    moved = [{"why": each.reason, "what": ", ".join(each.paths), "where": each.place} for each in run.moved]
    title = "" if shown is None else f"Iteration {shown.iteration}: every metric"
    every = Table(title, rows, ("name in metrics.parquet",))
    return Report("", tables=[every, Table("Quarantined and previous", moved, ("what", "where"))])


def _curves(run: RunView, console: Console, limit: int | None) -> RichTable:
    wide = console.width >= WIDE
    headings = ("over iterations", "", "first", "last", *(("least", "most") if wide else ()))
    table = table_of("Curves", headings, (), right=range(2, len(headings)))
    table.columns[0].min_width, table.columns[1].no_wrap = 26, True
    by_dataset = {name: run.series(name) for name in run.dataset_rewards.values()}
    plotted = {name: run.series(name) for name in plotted_metrics(run)}
    shown = {"reward": run.series("reward"), "heldout_reward": run.heldout_series(), **by_dataset, **plotted}
    blocks = _blocks(console)
    for name, points in list(shown.items())[:limit]:
        values = [value for _, value in points]
        if values:
            columns = (values[0], values[-1], *((min(values), max(values)) if wide else ()))
            line = sparkline(values, SPARK_WIDTH if wide else SPARK_WIDTH - 8, blocks)
            title = metric_title(name, run.noun, run.stream, run.trained_on)[0]
            table.add_row(plain(title), line, *(f"{value:.4g}" for value in columns))
    return table


def _heldout(run: RunView, heldout: Heldout, console: Console, limit: int) -> RichTable:
    seeds = "same seeds" if heldout.same_seeds else "other seeds"
    title = f"Held-out prompts, policy {heldout.versions[0]} and policy {heldout.versions[-1]}, {seeds}"
    texts, images = run.noun == "completion", has_colours(console)
    table = table_of(title, ("prompt", "reward", *(("before", "after") if texts or images else ())), ())
    table.show_lines = images
    table.columns[0].ratio, table.columns[1].no_wrap = 1, True
    for column in table.columns[2:]:
        column.no_wrap, column.ratio = not texts, 1 if texts else None
    for before, after in heldout.pairs[:limit]:
        samples = (before.samples[0], after.samples[0])
        cells: list[RenderableType] = [_prompt(before), change(before.reward, after.reward)]
        table.add_row(*cells, *(_output(sample) for sample in samples if texts or images))
    table.caption = _left_out(min(len(heldout.pairs), limit), heldout.total)
    return table


def _groups(run: RunView, groups: Groups, console: Console, limit: int) -> RichTable:
    assert run.shown is not None, "groups are those of an iteration"
    title = f"Iteration {run.shown.iteration}: best and worst {run.noun} per prompt"
    table = table_of(title, ("prompt", "best", "worst"), ())
    table.show_lines = True
    for column, ratio in zip(table.columns, (2, 3, 3), strict=True):
        column.ratio = ratio
    for group in groups.shown[:limit]:
        first = group.samples[0]
        about = _prompt(group)
        for name in groups.varying:
            about.append_text(Text("\n")).append_text(plain(first[name]))
        about.append("\nmean " + number(group.reward), "dim")
        if first["dropped"]:
            about.append(", left out of the update", "dim")
        table.add_row(about, *(_cell(sample, console) for sample in (group.best or first, group.worst)))
    replaced = groups.describe() if groups.rounds > 1 or groups.dropped else None
    table.caption = "\n".join(filter(None, (replaced, _left_out(min(len(groups.shown), limit), groups.total)))) or None
    return table


def show_comparison(found: "Comparison", settings: Table, console: Console) -> None:
    """Print the curves of runs, the settings that differ, and the held-out prompts that differ most."""
    if found.curves:
        console.print(_compared_curves(found, console))
    show_report(Report("", tables=[settings]), console)
    if found.prompts:
        console.print(_compared_prompts(found))


def _compared_curves(found: "Comparison", console: Console) -> RichTable:
    labels = [run.label for run in found.runs]
    table = table_of("Curves, each row on one scale, with their last values", ("over iterations", *labels), ())
    for curve in found.curves:
        by_run = {label: [value for _, value in curve.series.get(label, ())] for label in labels}
        known = [value for values in by_run.values() for value in values]
        longest = max(map(len, by_run.values()))
        cells = []
        for values in by_run.values():
            # A character stands for as many points in every run.
            width = max(1, round(COMPARED_CURVE * len(values) / max(longest, COMPARED_CURVE)))
            line = sparkline(values, width, _blocks(console), (min(known), max(known)))
            cells.append(Text(f"{line} {values[-1]:.4g}" if values else ""))
        table.add_row(plain(curve.title), *cells)
    return table


def _compared_prompts(found: "Comparison") -> RichTable:
    labels = list(found.prompts[0])
    table = table_of(f"Held-out prompts that differ most, {found.measure}", ("prompt", *labels), ())
    table.show_lines = True
    for groups in found.prompts[:COMPARED_PROMPTS]:
        cells = []
        for group in groups.values():
            output = group.samples[0]["output"]
            shown = plain(number(group.reward))
            if isinstance(output, str):
                shown.append("\n").append(_text(group.samples[0], COMPARED_LETTERS))
            cells.append(shown)
        table.add_row(_prompt(groups[labels[0]]), *cells)
    if found.total > COMPARED_PROMPTS:
        table.caption = f"{COMPARED_PROMPTS} of {found.total} prompts; --html FILE shows more"
    return table


def _blocks(console: Console) -> str:
    return UNICODE_BLOCKS if console.encoding.lower().startswith("utf") else ASCII_BLOCKS


def _prompt(group: Group) -> Text:
    return plain(one_line(shown_question(group.samples[0]["prompt"]), LETTERS))


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
        return _text(sample, LETTERS, style="bold")
    return thumbnail(output) if output is not None else Text(PRUNED, style="dim")


def _text(sample: Row, letters: int, style: str = "") -> Text:
    shown = plain(one_line(sample["output"], letters) or "(empty)")
    shown.stylize(style)
    return shown if sample["finished"] else shown.append(TRUNCATED, style="dim")


def _left_out(shown: int, total: int) -> str | None:
    return f"{shown} of {total} prompts" if shown < total else None


def show_sample(prompt: str, text: str | None, file: str | None, console: Console, *, truncated: bool) -> None:
    """Print a new sample: the prompt with the text, or with the path of the image and the image itself."""
    console.print(plain(prompt), style="dim", soft_wrap=True)
    if text is not None:
        shown = plain(text)
        console.print(shown.append(TRUNCATED, style="dim") if truncated else shown, soft_wrap=True, highlight=False)
    if file is not None:
        console.print(plain(relative(file)), soft_wrap=True, highlight=False)
        if has_colours(console):
            with Image.open(file) as image:
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
