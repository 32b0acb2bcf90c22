"""The look of all plots: figures without global state, as PNG files, or as SVG that follows the theme of its page.

Matplotlib takes a second to import, so this module and those that plot are imported only where something is plotted.
"""

import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import MaxNLocator

FONT = "DejaVu Sans"
"""Ships with matplotlib."""

DOTS_PER_INCH = 110
COLOURS = ("#2563eb", "#c2410c", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#4d7c0f", "#0e7490", "#6b7280", "#111827")
INK, SOFT, LINE = "#16191d", "#5b6470", "#dfe3e8"
MAX_LETTERS = 30
MAX_MARKERS = 60
"""A line of more points than this has a marker at its last point only."""

_THEME = {INK: "--ink", SOFT: "--soft", LINE: "--line", **{COLOURS[index]: f"--s{index}" for index in range(6)}}
"""Variables of the pages' style sheet by the colour that represents them in a figure."""

_TOOLTIP = "tooltip:"

Points = Sequence[tuple[float, float]]


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, whose parts make room for one another."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")


def png_of(figure: Figure) -> bytes:
    """Write a figure as PNG, without the library's version: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def svg_of(figure: Figure, label: str) -> Markup:
    """Write a figure as an SVG element for a page.

    Its texts stay texts, its background is transparent, its colours are those of the page's theme, and it references
    nothing outside itself.

    Args:
        figure: figure to write; the element has 72 units per inch.
        label: text alternative for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    written = buffer.getvalue()
    box = re.search(r'viewBox="[^"]*"', written)
    assert box is not None, "matplotlib writes the size of an image"
    body = written[written.index(">", written.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<clipPath .*?</clipPath>", "", body, flags=re.DOTALL)
    body = re.sub(r' clip-path="[^"]*"|font: 10px [^;"]*;?|font-family: [^;"]*;?', "", body)
    body = re.sub(rf'<g id="{_TOOLTIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*"/>\s*', "", re.sub(r'<g id="[^"]*">', "<g>", body))
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var({variable})")
    return Markup(f'<svg {box[0]} role="img" aria-label="{escape(label)}">{body}')


def set_tooltip(artist: Artist, text: str) -> None:
    """Show a text when the pointer is over this artist in an SVG."""
    artist.set_gid(_TOOLTIP + text)


def quiet(axes: Axes, *, grid: str) -> None:
    """Draw axes without a box, with faint lines across the values.

    Args:
        axes: axes to change.
        grid: "x", "y" or "both".
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=SOFT, labelsize=9, length=3)
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=LINE, linewidth=0.8)  # type: ignore[arg-type]


def headline(figure: Figure, title: str, meaning: str) -> None:
    """Write a title above everything, and a sentence below in smaller letters."""
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(meaning, x=0.012, ha="left", fontsize=9, color=SOFT)


def plot_label(label: str, letters: int = MAX_LETTERS) -> str:
    """Turn a label into plain text for a figure: shortened in the middle, letters without a glyph replaced."""
    kept = "".join(letter if ord(letter) in _glyphs() else "\N{REPLACEMENT CHARACTER}" for letter in label)
    if len(kept) > letters:
        kept = f"{kept[: letters - letters // 3 - 1]}…{kept[-(letters // 3) :]}"
    return kept.replace("$", r"\$")


@functools.cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap()) - {ord("\n"), ord("\t"), ord("\r")}


def colour_of(index: int) -> str:
    """Choose the colour of the series of this number."""
    return COLOURS[index % len(COLOURS)]


def markers(points: int) -> str:
    """Choose the marker of a line: a dot at each point of one that has few."""
    return "o" if points <= 40 else ""


def integer_ticks(most: int) -> MaxNLocator:
    """Place ticks at round integers, about `most` of them."""
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])


@dataclass(frozen=True)
class LinePlot:
    """Lines over iterations, ready for a page.

    Attributes:
        title: in plain words.
        meaning: a sentence.
        lines: name and last value of each line, in the order of their colours; never empty.
        svg: the plot.
        legend: whether the page shows the names of the lines.
    """

    title: str
    meaning: str
    lines: tuple[tuple[str, str], ...]
    svg: Markup
    legend: bool


def line_plot(
    title: str,
    meaning: str,
    series: Mapping[str, Points],
    *,
    width: int = 360,
    height: int = 170,
    legend: bool = False,
) -> LinePlot | None:
    """Plot lines over iterations; None without any point.

    Args:
        title: in plain words.
        meaning: a sentence.
        series: (iteration, value) points by name, in the order of the iterations; all finite.
        width: pixels.
        height: pixels.
        legend: whether the page writes the names of the lines.
    """
    lines = {name: points for name, points in series.items() if points}
    if not lines:
        return None
    figure = new_figure(width / 72, height / 72)
    axes = figure.add_subplot()
    quiet(axes, grid="y")
    axes.spines[:].set_visible(False)
    axes.tick_params(labelsize=10.5, length=0, pad=5)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(integer_ticks(6 if width < 600 else 12))
    ticks = _value_ticks([y for points in lines.values() for _, y in points])
    axes.set_yticks(ticks, [f"{tick:.4g}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    for index, (name, points) in enumerate(lines.items()):
        colour = colour_of(index % 6)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8)
        for x, y in points if len(points) <= MAX_MARKERS else points[-1:]:
            (marker,) = axes.plot(x, y, "o", color=colour, markersize=4.5, markeredgewidth=0)
            set_tooltip(marker, f"{name}, iteration {x:g}: {y:.4g}")
    last = tuple((name, f"{points[-1][1]:.4g}") for name, points in lines.items())
    return LinePlot(title, meaning, last, svg_of(figure, f"{title} over iterations"), legend)


def _value_ticks(values: Sequence[float]) -> Sequence[float]:
    """Choose about three round steps from below the least to above the largest value."""
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    return [float(tick) for tick in MaxNLocator(nbins=3, steps=[1, 2, 5, 10]).tick_values(low, high)]
