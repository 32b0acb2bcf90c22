"""The mean of each reward over iterations."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.reports.rewards_analysis.figures import COLOURS, SOFT, headline, markers, whole_numbers
from tasks.reports.rewards_analysis.panels import draw_panels
from tasks.reports.rewards_analysis.records import RewardAnalysis, RewardMetrics


def draw_trend(analysis: RewardAnalysis) -> Figure | None:
    """A panel a reward, each with a scale of its own; None with fewer than two iterations."""
    if len({point.iteration for reward in analysis.rewards for point in reward.trend}) < 2:
        return None
    figure = draw_panels(analysis, _draw)
    figure.supylabel("mean reward", fontsize=9, color=SOFT)
    headline(figure, "Mean of each reward over iterations", "iteration; each panel has a scale of its own")
    return figure


def _draw(panel: Axes, reward: RewardMetrics) -> bool:
    points = [(point.iteration, point.mean) for point in reward.trend if point.mean is not None]
    if not points:
        return False
    iterations, means = zip(*points, strict=True)
    panel.plot(iterations, means, color=COLOURS[0], linewidth=1.8, marker=markers(len(points)), markersize=3.5)
    low, high = min(means), max(means)
    room = (high - low) or abs(high) * 0.1 or 1.0
    panel.set_ylim(low - 0.08 * room, high + 0.3 * room)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4))
    panel.xaxis.set_major_locator(whole_numbers(5))
    said = f"{means[0]:.3f} → {means[-1]:.3f}  ({means[-1] - means[0]:+.3f})"
    panel.text(0.03, 0.98, said, transform=panel.transAxes, va="top", fontsize=8, color=SOFT)
    return True
