"""Plots of distributions as SVG that follows a page's theme, and those of guardrails as PNG.

Matplotlib takes a second to import, so this module is imported only where something is plotted.
"""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tasks.reports.fonts import FAMILY, Fonts, families_of, fonts_for
from tasks.reports.statistics import BINS, Histogram
from tasks.reports.text import counted, visible

DOTS_PER_INCH = 110
COLOURS = ("#2563eb", "#c2410c", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#4d7c0f", "#0e7490", "#6b7280", "#111827")
INK, SOFT, LINE = "#16191d", "#5b6470", "#dfe3e8"
MAX_MARKERS = 60
"""A line of more points than this has no marker at each of them."""

_THEME = {INK: "--ink", SOFT: "--soft", LINE: "--line", **{COLOURS[index]: f"--s{index}" for index in range(6)}}
"""Variables of the pages' style sheet by the colour that represents them in a figure."""

_TOOLTIP = "tooltip:"

FAINTEST = 0.18

Rewards = npt.NDArray[np.float64]


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, whose parts make room for one another."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")


def svg_of(figure: Figure, label: str) -> Markup:
    """Write a figure as an SVG element for a page.

    Its texts stay texts, its background is transparent, its colours are those of the page's theme, and it references
    nothing outside itself. It has 72 units per inch; the label is its text alternative for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    written = visible(buffer.getvalue())
    box = re.search(r'viewBox="[^"]*"', written)
    assert box is not None, "matplotlib writes the size of an image"
    body = written[written.index(">", written.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<clipPath .*?</clipPath>", "", body, flags=re.DOTALL)
    body = re.sub(r' clip-path="[^"]*"|font: 10px [^;"]*;?|font-family: [^;"]*;?', "", body)
    body = re.sub(rf'<g id="{_TOOLTIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*"/>\s*', "", re.sub(r'<g id="[^"]*">', "<g>", body))
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var({variable})")
    return Markup(f'<svg {box[0]} role="img" aria-label="{escape(visible(label))}">{body}')


def set_tooltip(artist: Artist, text: str) -> None:
    """Show a text when the pointer is over this artist in an SVG."""
    artist.set_gid(_TOOLTIP + text)


def quiet(axes: Axes, *, grid: str) -> None:
    """Draw axes without a box, with faint lines across the values of the axis `grid`: "x" or "y"."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=SOFT, labelsize=9, length=3)
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=LINE, linewidth=0.8)  # type: ignore[arg-type]


def colour_of(index: int) -> str:
    """Choose the colour of the series of this number."""
    return COLOURS[index % len(COLOURS)]


def integer_ticks(most: int) -> MaxNLocator:
    """Place ticks at round integers, about `most` of them."""
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])


def plot_joint(before: Rewards, after: Rewards) -> Markup:
    """Plot previous against later rewards of the same samples, one square per bin, darker where more samples lie."""
    counts, rows, columns = np.histogram2d(before, after, bins=BINS)
    figure, axes = _axes(7.8, 6.6, "previous reward", "later reward")
    for row, column in np.argwhere(counts):
        strength = np.log1p(counts[row, column]) / np.log1p(counts.max())
        left, right, low, high = rows[row], rows[row + 1], columns[column], columns[column + 1]
        alpha = FAINTEST + (1 - FAINTEST) * strength
        square = axes.add_patch(Rectangle((left, low), right - left, high - low, color=COLOURS[0], alpha=alpha, lw=0))
        size = counted(int(counts[row, column]), "sample")
        set_tooltip(square, f"{size}: previous {left:.3f} to {right:.3f}, later {low:.3f} to {high:.3f}")
    axes.set_xlim(rows[0], rows[-1])
    axes.set_ylim(columns[0], columns[-1])
    axes.margins(0.02)
    return svg_of(figure, "Previous and later reward")


def plot_distribution(histogram: Histogram, name: str, *, series: int) -> Markup:
    """Plot how many samples have which reward, in the colour of this series; the histogram is counts and edges."""
    counts, edges = histogram
    figure, axes = _axes(7.8, 2.7, name, "samples")
    for bar, count in zip(axes.bar(edges[:-1], counts, np.diff(edges), align="edge"), counts, strict=True):
        bar.set(color=COLOURS[series], edgecolor="none", visible=count > 0)
        low, high = bar.get_x(), bar.get_x() + bar.get_width()
        set_tooltip(bar, f"{counted(int(count), 'sample')}: {name} {low:.3f} to {high:.3f}")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    return svg_of(figure, name.capitalize())


def _axes(width: float, height: float, across: str, up: str) -> tuple[Figure, Axes]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    quiet(axes, grid="y")
    axes.tick_params(labelsize=11)
    axes.set_xlabel(across, fontsize=11, color=SOFT)
    axes.set_ylabel(up, fontsize=11, color=SOFT)
    return figure, axes


MAX_LETTERS = 30
Series = Sequence[float | None]

UPPER, LOWER = 1.9, 3.4
"""Heights of the two panels in inches."""


def plot_guardrails(versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series]) -> bytes:
    """Plot the reward above, and below it each guardrail as a multiple of its first value, as PNG.

    A reward that rises while they fall is being hacked. A guardrail without values, or whose first value is zero, has
    no multiple and is named below the plot. Policy versions ascend; a series has a value or None for each.
    """
    fonts = fonts_for(guardrails)
    with matplotlib.rc_context({"font.family": [FAMILY, *families_of(fonts.paths[1:])]}):
        return png_of(_draw_guardrails(versions, rewards, guardrails, fonts))


def _draw_guardrails(
    versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series], fonts: Fonts
) -> Figure:
    multiples = [(plot_label(name, fonts), normalised(series)) for name, series in guardrails.items()]
    plotted = [(label, series) for label, series in multiples if series is not None]
    left_out = [label for label, series in multiples if series is None]
    lower = LOWER + 0.2 * max(0, len(plotted) - 14)
    figure = new_figure(10.5, UPPER + lower + 0.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[UPPER, lower])
    below.axhline(1.0, color=SOFT, linewidth=1, linestyle="--")
    _plot_lines(above, versions, [("reward", rewards)], [INK], "{:.3f}  {}")
    _plot_lines(below, versions, plotted, [colour_of(index) for index in range(len(plotted))], "×{:.2f}  {}")
    above.set_ylabel("held-out reward", fontsize=9, color=SOFT)
    below.set_ylabel("guardrail / its first value", fontsize=9, color=SOFT)
    below.set_xlabel("policy version", fontsize=9, color=SOFT)
    if len(versions) > 1:
        above.xaxis.set_major_locator(integer_ticks(10))
    else:
        above.set_xticks(versions)
    note = f"; begin at zero or have no values: {', '.join(left_out)}" if left_out else ""
    headline(figure, "Held-out reward and guardrails", f"guardrails as multiples of their first value{note}")
    return figure


def normalised(series: Series) -> list[float | None] | None:
    """Divide a series by its first value; None where that is zero, or where there is none."""
    first = next((value for value in series if value is not None), None)
    if not first:
        return None
    return [None if value is None else value / first for value in series]


def _plot_lines(
    axes: Axes, versions: Sequence[int], lines: Sequence[tuple[str, Series]], colours: Sequence[str], form: str
) -> None:
    """Plot the values that there are, with each line's last value and name in a legend to the right of the axes."""
    quiet(axes, grid="y")
    axes.margins(x=0.02, y=0.1)
    for (name, series), colour in zip(lines, colours, strict=True):
        points = [(version, value) for version, value in zip(versions, series, strict=True) if value is not None]
        if points:
            label = form.format(points[-1][1], name)
            marker = "o" if len(points) <= MAX_MARKERS else ""
            axes.plot(
                *zip(*points, strict=True), color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label
            )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, labelcolor="linecolor")


def png_of(figure: Figure) -> bytes:
    """Write a figure as PNG, without the library's version: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def headline(figure: Figure, title: str, meaning: str) -> None:
    """Write a title above everything, and a sentence below in smaller letters."""
    # Of the other fonts few are bold.
    bold = {"fontfamily": FAMILY, "fontweight": "bold"}
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=INK, **bold)
    figure.supxlabel(meaning, x=0.012, ha="left", fontsize=9, color=SOFT)


def plot_label(label: str, fonts: Fonts, letters: int = MAX_LETTERS) -> str:
    """Turn a label into plain text for a figure: one line, shortened in the middle, with code points for no glyph."""
    kept = fonts.shown(" ".join(label.split()))
    if len(kept) > letters:
        kept = f"{kept[: letters - letters // 3 - 1]}…{kept[-(letters // 3) :]}"
    return kept.replace("$", r"\$")
