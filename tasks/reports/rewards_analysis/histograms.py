"""How the values of each reward are distributed: one small histogram a reward."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.reports.layout import percent
from tasks.reports.rewards_analysis.figures import COLOURS, SOFT, headline
from tasks.reports.rewards_analysis.panels import draw_panels
from tasks.reports.rewards_analysis.records import RewardAnalysis, RewardMetrics


def draw_histograms(analysis: RewardAnalysis) -> Figure:
    """A panel a reward, its mean as a line."""
    figure = draw_panels(analysis, _draw)
    figure.supylabel("samples", fontsize=9, color=SOFT)
    headline(
        figure,
        "Values of each reward",
        "from 0 to 1 where all values are, else from the least to the most; dashed: mean",
    )
    return figure


def _draw(panel: Axes, reward: RewardMetrics) -> bool:
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
    at = f"mean {mean:.3g}"
    if (histogram.low, histogram.high) == (0.0, 1.0):
        at += f"   at 0: {percent(saturation.at_floor)}   at 1: {percent(saturation.at_ceiling)}"
    panel.text(0.03, 0.98, at, transform=panel.transAxes, va="top", fontsize=8, color=SOFT)
    return True
