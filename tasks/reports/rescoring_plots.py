"""Plots of a rescoring: previous against later reward, and the distribution of each."""

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tasks.reports.plots import COLOURS, SOFT, new_figure, quiet, set_tooltip, svg_of
from tasks.reports.statistics import BINS
from tasks.reports.text import counted

FAINTEST = 0.18

Rewards = npt.NDArray[np.float64]


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


def plot_rewards(rewards: Rewards, name: str, *, series: int) -> Markup:
    """Plot how many samples have which reward, in the colour of this series."""
    counts, edges = np.histogram(rewards, BINS)
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
