"""A drawing without any global state, and its PNG: the same input gives the same bytes."""

import functools
import io

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


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, whose parts make room for one another."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")


def png_of(figure: Figure) -> bytes:
    """The figure as PNG, without the library's version in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def quiet(axes: Axes, *, grid: str) -> None:
    """Axes without a box, with faint lines across the values.

    Args:
        axes: to be changed.
        grid: "x", "y" or "both".
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=SOFT, labelsize=9, length=3)
    axes.set_axisbelow(True)
    if grid in ("x", "both"):
        axes.xaxis.grid(True, color=LINE, linewidth=0.8)
    if grid in ("y", "both"):
        axes.yaxis.grid(True, color=LINE, linewidth=0.8)


def headline(figure: Figure, title: str, meaning: str) -> None:
    """A title above everything, and a sentence below in smaller letters."""
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(meaning, x=0.012, ha="left", fontsize=9, color=SOFT)


def written(label: str, letters: int = MAX_LETTERS) -> str:
    """A label as text and nothing else, its middle left out where it is long; a letter without a glyph is marked."""
    kept = "".join(letter if ord(letter) in _glyphs() else "\N{REPLACEMENT CHARACTER}" for letter in label)
    if len(kept) > letters:
        kept = f"{kept[: letters - letters // 3 - 1]}…{kept[-(letters // 3) :]}"
    return kept.replace("$", r"\$")


@functools.cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap()) - {ord("\n"), ord("\t"), ord("\r")}


def colour_of(index: int) -> str:
    """The colour of the series of this number."""
    return COLOURS[index % len(COLOURS)]


def markers(points: int) -> str:
    """A dot at each point of a line that has few."""
    return "o" if points <= 40 else ""


def whole_numbers(most: int) -> MaxNLocator:
    """Ticks at round whole numbers, about so many at most."""
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])
