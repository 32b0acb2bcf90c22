"""One small drawing a reward, side by side."""

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.reports.rewards_analysis.figures import INK, SOFT, new_figure, quiet, written
from tasks.reports.rewards_analysis.records import RewardAnalysis, RewardMetrics

ACROSS = 4

SamplingRound = Callable[[Axes, RewardMetrics], bool]
"""Fills a panel; False where there is nothing to fill it with."""


def draw_panels(analysis: RewardAnalysis, draw: SamplingRound) -> Figure:
    """A panel a reward with its name above; one that has nothing to show says so."""
    columns = min(ACROSS, len(analysis.rewards))
    rows = math.ceil(len(analysis.rewards) / columns)
    figure = new_figure(max(6.5, 3.1 * columns), 0.9 + 2.35 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, reward in zip(panels, analysis.rewards, strict=False):
        quiet(panel, grid="y")
        panel.set_title(written(reward.label), fontsize=10, color=INK, loc="left")
        if not draw(panel, reward):
            panel.text(0.5, 0.5, "no values", transform=panel.transAxes, ha="center", va="center", color=SOFT)
            panel.set(xticks=[], yticks=[])
    for panel in panels[len(analysis.rewards) :]:
        panel.set_visible(False)
    return figure
