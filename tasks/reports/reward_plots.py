"""The held-out reward against its guardrails, as a PNG file that a run keeps."""

import functools
import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from tasks.reports.plots import (
    DOTS_PER_INCH,
    INK,
    MAX_MARKERS,
    SOFT,
    colour_of,
    integer_ticks,
    new_figure,
    quiet,
)

FONT = "DejaVu Sans"
"""Ships with matplotlib."""

MAX_LETTERS = 30
Series = Sequence[float | None]

UPPER, LOWER = 1.9, 3.4
"""Heights of the two panels in inches."""


def plot_guardrails(versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series]) -> bytes:
    """Plot the reward above, and below it each guardrail as a multiple of its first value, as PNG.

    A reward that rises while they fall is being hacked. A guardrail without values, or whose first value is zero, has
    no multiple and is named below the plot. Policy versions ascend; a series has a value or None for each.
    """
    multiples = {name: normalised(series) for name, series in guardrails.items()}
    plotted = {name: series for name, series in multiples.items() if series is not None}
    left_out = [plot_label(name) for name in guardrails if name not in plotted]
    lower = LOWER + 0.2 * max(0, len(plotted) - 14)
    figure = new_figure(10.5, UPPER + lower + 0.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[UPPER, lower])
    below.axhline(1.0, color=SOFT, linewidth=1, linestyle="--")
    _plot_lines(above, versions, {"reward": rewards}, [INK], "{:.3f}  {}")
    _plot_lines(below, versions, plotted, [colour_of(index) for index in range(len(plotted))], "×{:.2f}  {}")
    above.set_ylabel("held-out reward", fontsize=9, color=SOFT)
    below.set_ylabel("guardrail / its first value", fontsize=9, color=SOFT)
    below.set_xlabel("policy version", fontsize=9, color=SOFT)
    if len(versions) > 1:
        above.xaxis.set_major_locator(integer_ticks(10))
    else:
        above.set_xticks(versions)
    note = f"; begin at zero or have no values: {', '.join(left_out)}" if left_out else ""
    _headline(figure, "Held-out reward and guardrails", f"guardrails as multiples of their first value{note}")
    return _png_of(figure)


def normalised(series: Series) -> list[float | None] | None:
    """Divide a series by its first value; None where that is zero, or where there is none."""
    first = next((value for value in series if value is not None), None)
    if not first:
        return None
    return [None if value is None else value / first for value in series]


def _plot_lines(
    axes: Axes, versions: Sequence[int], lines: Mapping[str, Series], colours: Sequence[str], form: str
) -> None:
    """Plot the values that there are, with each line's last value and name in a legend to the right of the axes."""
    quiet(axes, grid="y")
    axes.margins(x=0.02, y=0.1)
    for (name, series), colour in zip(lines.items(), colours, strict=True):
        points = [(version, value) for version, value in zip(versions, series, strict=True) if value is not None]
        if points:
            label = form.format(points[-1][1], plot_label(name))
            marker = "o" if len(points) <= MAX_MARKERS else ""
            axes.plot(
                *zip(*points, strict=True), color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label
            )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, labelcolor="linecolor")


def _png_of(figure: Figure) -> bytes:
    """Write a figure as PNG, without the library's version: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def _headline(figure: Figure, title: str, meaning: str) -> None:
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
