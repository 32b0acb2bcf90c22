"""Plots of an analysis of rewards, as PNG files: values, agreement, trend and cost of each reward."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tasks.reports.plots import (
    COLOURS,
    INK,
    SOFT,
    headline,
    integer_ticks,
    markers,
    new_figure,
    plot_label,
    png_of,
    quiet,
)
from tasks.reports.reward_analysis import Agreement, RewardAnalysis, RewardMetrics
from tasks.reports.text import correlation, percent

PANELS_PER_ROW = 4

LOG_SCALE_RATIO = 50
"""Ratio of the highest to the lowest cost, beyond which the axis is logarithmic."""


def plot_rewards(analysis: RewardAnalysis) -> dict[str, bytes]:
    """Plot everything as PNG by file name, in the order of the page; empty plots are left out."""
    plots: Mapping[str, Callable[[RewardAnalysis], Figure | None]] = {
        "histograms.png": plot_histograms,
        "agreement.png": plot_agreement,
        "trend.png": plot_trend,
        "cost.png": plot_cost,
    }
    figures = {name: plot(analysis) for name, plot in plots.items()}
    return {name: png_of(figure) for name, figure in figures.items() if figure is not None}


def _panels(analysis: RewardAnalysis, fill: Callable[[Axes, RewardMetrics], bool]) -> Figure:
    """Plot one panel per reward with its name above; `fill` returns False for a panel without values."""
    columns = min(PANELS_PER_ROW, len(analysis.rewards))
    rows = math.ceil(len(analysis.rewards) / columns)
    figure = new_figure(max(6.5, 3.1 * columns), 0.9 + 2.35 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, reward in zip(panels, analysis.rewards, strict=False):
        quiet(panel, grid="y")
        panel.set_title(plot_label(reward.label), fontsize=10, color=INK, loc="left")
        if not fill(panel, reward):
            panel.text(0.5, 0.5, "no values", transform=panel.transAxes, ha="center", va="center", color=SOFT)
            panel.set(xticks=[], yticks=[])
    for panel in panels[len(analysis.rewards) :]:
        panel.set_visible(False)
    return figure


def plot_histograms(analysis: RewardAnalysis) -> Figure:
    """Plot how the values of each reward are distributed, one panel per reward, its mean as a line."""
    figure = _panels(analysis, _histogram)
    figure.supylabel("samples", fontsize=9, color=SOFT)
    meaning = "from 0 to 1 where all values are, else from the minimum to the maximum; dashed: mean"
    headline(figure, "Values of each reward", meaning)
    return figure


def _histogram(panel: Axes, reward: RewardMetrics) -> bool:
    histogram, mean, saturation = reward.histogram, reward.spread.mean, reward.saturation
    if histogram is None or mean is None or saturation is None:
        return False
    edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
    panel.stairs(histogram.counts, edges, fill=True, color=COLOURS[0], alpha=0.85)
    panel.axvline(mean, ymax=0.86, color=COLOURS[1], linewidth=1.4, linestyle="--")
    panel.set_xlim(histogram.low, histogram.high)
    panel.set_ylim(0, max(histogram.counts) * 1.28)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
    note = f"mean {mean:.3g}"
    if (histogram.low, histogram.high) == (0.0, 1.0):
        note += f"   at 0: {percent(saturation.at_floor)}   at 1: {percent(saturation.at_ceiling)}"
    panel.text(0.03, 0.98, note, transform=panel.transAxes, va="top", fontsize=8, color=SOFT)
    return True


def plot_trend(analysis: RewardAnalysis) -> Figure | None:
    """Plot the mean of each reward over iterations, one panel per reward; None with fewer than two iterations."""
    if len({point.iteration for reward in analysis.rewards for point in reward.trend}) < 2:
        return None
    figure = _panels(analysis, _trend)
    figure.supylabel("mean reward", fontsize=9, color=SOFT)
    headline(figure, "Mean of each reward over iterations", "iteration; each panel has its own scale")
    return figure


def _trend(panel: Axes, reward: RewardMetrics) -> bool:
    points = [(point.iteration, point.mean) for point in reward.trend if point.mean is not None]
    if not points:
        return False
    iterations, means = zip(*points, strict=True)
    panel.plot(iterations, means, color=COLOURS[0], linewidth=1.8, marker=markers(len(points)), markersize=3.5)
    low, high = min(means), max(means)
    room = (high - low) or abs(high) * 0.1 or 1.0
    panel.set_ylim(low - 0.08 * room, high + 0.3 * room)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4))
    panel.xaxis.set_major_locator(integer_ticks(5))
    note = f"{means[0]:.3f} → {means[-1]:.3f}  ({means[-1] - means[0]:+.3f})"
    panel.text(0.03, 0.98, note, transform=panel.transAxes, va="top", fontsize=8, color=SOFT)
    return True


def plot_agreement(analysis: RewardAnalysis) -> Figure | None:
    """Plot the rank correlations of all pairs, over all samples and within groups; None with fewer than two rewards."""
    count = len(analysis.rewards)
    if count < 2:
        return None
    side = 1.3 + 0.62 * count
    figure = new_figure(2 * side + 3.6, side + 2.25)
    overall, within = figure.subplots(1, 2, sharey=True)
    _matrix(overall, analysis, "over all samples", lambda pair: pair.ranks.overall)
    title = "within groups, mean: what a policy learns from"
    _matrix(within, analysis, title, lambda pair: pair.ranks.within_groups)
    within.tick_params(left=False)
    bar = figure.colorbar(within.images[0], ax=[overall, within], shrink=0.7, aspect=30, pad=0.01)
    bar.set_label("Spearman's rank correlation", fontsize=9, color=SOFT)
    bar.ax.tick_params(labelsize=8, colors=SOFT)
    bar.outline.set_visible(False)
    headline(figure, "Agreement between rewards", "1: the same order; 0: unrelated; -1: the reverse; –: not defined")
    return figure


def _matrix(panel: Axes, analysis: RewardAnalysis, title: str, measure: Callable[[Agreement], float | None]) -> None:
    labels = [reward.label for reward in analysis.rewards]
    matrix = np.full((len(labels), len(labels)), np.nan)
    for pair in analysis.agreements:
        value = measure(pair)
        row, column = labels.index(pair.first), labels.index(pair.second)
        matrix[row, column] = matrix[column, row] = np.nan if value is None else value
    panel.imshow(np.ma.masked_invalid(matrix), cmap="RdBu", vmin=-1, vmax=1)
    panel.set_facecolor("#e5e7eb")
    for row, column in np.ndindex(*matrix.shape):
        rho = float(matrix[row, column])
        text = "" if row == column else "–" if math.isnan(rho) else correlation(rho)
        colour = "white" if abs(rho) > 0.6 else INK
        if row == column:
            panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color="white"))
        panel.text(column, row, text, ha="center", va="center", fontsize=8.5, color=colour)
    names = [plot_label(label, 24) for label in labels]
    panel.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.tick_params(length=0, colors=INK)
    panel.spines[:].set_visible(False)
    panel.set_title(title, fontsize=10, color=INK, loc="left")


def plot_cost(analysis: RewardAnalysis) -> Figure | None:
    """Plot the seconds per sample, the slowest reward on top, with marks at the median and the 95th percentile."""
    costs = [(reward.label, reward.cost) for reward in analysis.rewards if reward.cost is not None]
    if not costs:
        return None
    costs.sort(key=lambda entry: entry[1].mean)
    figure = new_figure(9.0, 1.5 + 0.36 * len(costs))
    axes = figure.add_subplot()
    quiet(axes, grid="x")
    means = [cost.mean for _, cost in costs]
    rows = range(len(costs))
    axes.barh(rows, means, height=0.62, color=COLOURS[0], alpha=0.85)
    axes.scatter([cost.median for _, cost in costs], rows, marker="|", s=130, color=INK, linewidth=1.6, zorder=3)
    axes.scatter([cost.p95 for _, cost in costs], rows, marker="|", s=130, color=COLOURS[1], linewidth=1.6, zorder=3)
    if min(means) > 0 and max(means) > LOG_SCALE_RATIO * min(means):
        axes.set_xscale("log")
    for row, (_, cost) in zip(rows, costs, strict=True):
        end = (max(cost.mean, cost.median, cost.p95), row)
        text = f"{cost.mean:.3g} s"
        axes.annotate(text, end, (7, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    axes.set_yticks(rows, [plot_label(label) for label, _ in costs], fontsize=9, color=INK)
    axes.margins(x=0.12)
    axes.set_xlabel("seconds per sample", fontsize=9, color=SOFT)
    headline(figure, "Cost of each reward", "bar and number: mean; dark mark: median; orange mark: 95th percentile")
    return figure
