"""Plots of rewards as PNG files: the analysis of each reward, and the held-out reward against its guardrails."""

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from tasks.reports.plots import (
    COLOURS,
    DOTS_PER_INCH,
    INK,
    MAX_MARKERS,
    SOFT,
    colour_of,
    integer_ticks,
    new_figure,
    quiet,
)
from tasks.reports.statistics import Statistics, histogram_of, settled
from tasks.reports.text import change, correlation, percent

FONT = "DejaVu Sans"
"""Ships with matplotlib."""

MAX_LETTERS = 30
PANELS_PER_ROW = 4

LOG_SCALE_RATIO = 50
"""Ratio of the highest to the lowest cost, beyond which the axis is logarithmic."""

Series = Sequence[float | None]

UPPER, LOWER = 1.9, 3.4
"""Heights of the two panels in inches."""


def plot_rewards(analysis: Statistics, scores: pl.DataFrame) -> dict[str, bytes]:
    """Plot scores and their analysis as PNG by file name, in the order of the page; empty plots are left out."""
    figures = {
        "histograms.png": plot_histograms(analysis, scores),
        "agreement.png": plot_agreement(analysis),
        "trend.png": plot_trend(analysis),
        "cost.png": plot_cost(analysis),
    }
    return {name: _png_of(figure) for name, figure in figures.items() if figure is not None}


def _panels(analysis: Statistics, fill: Callable[[Axes, Statistics], str | None]) -> Figure:
    """Plot one panel per reward with its name above; `fill` returns the panel's note, or None without values."""
    rewards = analysis["rewards"]
    columns = min(PANELS_PER_ROW, len(rewards))
    rows = math.ceil(len(rewards) / columns)
    figure = new_figure(max(6.5, 3.1 * columns), 0.9 + 2.35 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, reward in zip(panels, rewards, strict=False):
        quiet(panel, grid="y")
        panel.locator_params(axis="y", nbins=4)
        note = fill(panel, reward)
        panel.set_title(f"{plot_label(reward['label'])}\n{note or 'no values'}", fontsize=9, color=INK, loc="left")
        if note is None:
            panel.set(xticks=[], yticks=[])
    for panel in panels[len(rewards) :]:
        panel.set_visible(False)
    return figure


def plot_histograms(analysis: Statistics, scores: pl.DataFrame) -> Figure:
    """Plot how the values of each reward are distributed, one panel per reward, its mean as a line."""
    figure = _panels(analysis, lambda panel, reward: _histogram(panel, reward, scores))
    figure.supylabel("samples", fontsize=9, color=SOFT)
    meaning = "from 0 to 1 where all values are, else from the minimum to the maximum; dashed: mean"
    _headline(figure, "Values of each reward", meaning)
    return figure


def _histogram(panel: Axes, reward: Statistics, scores: pl.DataFrame) -> str | None:
    histogram = histogram_of(settled(scores.filter(pl.col("label") == reward["label"]), ["value"])["value"])
    if histogram is None:
        return None
    (counts, edges), mean, saturation = histogram, reward["spread"]["mean"], reward["saturation"]
    panel.stairs(counts, edges, fill=True, color=COLOURS[0], alpha=0.85)
    panel.axvline(mean, color=COLOURS[1], linewidth=1.4, linestyle="--")
    panel.set_xlim(edges[0], edges[-1])
    panel.locator_params(axis="x", nbins=5)
    note = f"mean {mean:.3g}"
    if (edges[0], edges[-1]) == (0.0, 1.0):
        note += f"   at 0: {percent(saturation['at_floor'])}   at 1: {percent(saturation['at_ceiling'])}"
    return note


def plot_trend(analysis: Statistics) -> Figure | None:
    """Plot the mean of each reward over iterations, one panel per reward; None with fewer than two iterations."""
    if len({point["iteration"] for reward in analysis["rewards"] for point in reward["trend"]}) < 2:
        return None
    figure = _panels(analysis, _trend)
    figure.supylabel("mean reward", fontsize=9, color=SOFT)
    _headline(figure, "Mean of each reward over iterations", "iteration; each panel has its own scale")
    return figure


def _trend(panel: Axes, reward: Statistics) -> str | None:
    points = [(point["iteration"], point["mean"]) for point in reward["trend"] if point["mean"] is not None]
    if not points:
        return None
    iterations, means = zip(*points, strict=True)
    marker = "o" if len(points) <= MAX_MARKERS else ""
    panel.plot(iterations, means, color=COLOURS[0], linewidth=1.8, marker=marker, markersize=3.5)
    panel.xaxis.set_major_locator(integer_ticks(5))
    return change(means[0], means[-1])


def plot_agreement(analysis: Statistics) -> Figure | None:
    """Plot the rank correlations of all pairs, over all samples and within groups; None with fewer than two rewards."""
    count = len(analysis["rewards"])
    if count < 2:
        return None
    side = 1.3 + 0.62 * count
    figure = new_figure(2 * side + 2.4, side + 2.25)
    overall, within = figure.subplots(1, 2, sharey=True)
    _matrix(overall, analysis, "over all samples", lambda pair: pair["ranks"]["overall"])
    title = "within groups, mean: what a policy learns from"
    _matrix(within, analysis, title, lambda pair: pair["ranks"]["within_groups"])
    meaning = "Spearman's rank correlation; 1: the same order; 0: unrelated; -1: the reverse; –: not defined"
    _headline(figure, "Agreement between rewards", meaning)
    return figure


def _matrix(panel: Axes, analysis: Statistics, title: str, measure: Callable[[Statistics], float | None]) -> None:
    labels = [reward["label"] for reward in analysis["rewards"]]
    matrix = np.full((len(labels), len(labels)), np.nan)
    for pair in analysis["agreements"]:
        value = measure(pair)
        row, column = labels.index(pair["first"]), labels.index(pair["second"])
        matrix[row, column] = matrix[column, row] = np.nan if value is None else value
    panel.imshow(np.ma.masked_invalid(matrix), cmap="RdBu", vmin=-1, vmax=1)
    panel.set_facecolor("#e5e7eb")
    for row, column in np.ndindex(*matrix.shape):
        rho = float(matrix[row, column])
        text = "" if row == column else "–" if math.isnan(rho) else correlation(rho)
        colour = "white" if abs(rho) > 0.6 else INK
        panel.text(column, row, text, ha="center", va="center", fontsize=8.5, color=colour)
    names = [plot_label(label, 24) for label in labels]
    panel.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.tick_params(length=0, colors=INK)
    panel.spines[:].set_visible(False)
    panel.set_title(title, fontsize=10, color=INK, loc="left")


def plot_cost(analysis: Statistics) -> Figure | None:
    """Plot the seconds per sample, the slowest reward on top, with marks at the median and the 95th percentile."""
    costs = [(reward["label"], reward["cost"]) for reward in analysis["rewards"] if reward["cost"]]
    if not costs:
        return None
    costs.sort(key=lambda entry: entry[1]["mean"])
    figure = new_figure(9.0, 1.5 + 0.36 * len(costs))
    axes = figure.add_subplot()
    quiet(axes, grid="x")
    means = [cost["mean"] for _, cost in costs]
    rows = range(len(costs))
    axes.barh(rows, means, height=0.62, color=COLOURS[0], alpha=0.85)
    axes.scatter([cost["median"] for _, cost in costs], rows, marker="|", s=130, color=INK, linewidth=1.6, zorder=3)
    axes.scatter([cost["p95"] for _, cost in costs], rows, marker="|", s=130, color=COLOURS[1], linewidth=1.6, zorder=3)
    if min(means) > 0 and max(means) > LOG_SCALE_RATIO * min(means):
        axes.set_xscale("log")
    names = [f"{plot_label(label)}  {cost['mean']:.3g} s" for label, cost in costs]
    axes.set_yticks(rows, names, fontsize=9, color=INK)
    axes.set_xlabel("seconds per sample", fontsize=9, color=SOFT)
    _headline(figure, "Cost of each reward", "bar and number: mean; dark mark: median; orange mark: 95th percentile")
    return figure


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
