"""All plots of an analysis, as PNG."""

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from tasks.reports.rewards_analysis.agreement_plot import draw_agreement
from tasks.reports.rewards_analysis.cost_plot import draw_cost
from tasks.reports.rewards_analysis.figures import png_of
from tasks.reports.rewards_analysis.histograms import draw_histograms
from tasks.reports.rewards_analysis.records import RewardAnalysis
from tasks.reports.rewards_analysis.trend_plot import draw_trend

PLOTS: Mapping[str, Callable[[RewardAnalysis], Figure | None]] = {
    "histograms.png": draw_histograms,
    "agreement.png": draw_agreement,
    "trend.png": draw_trend,
    "cost.png": draw_cost,
}
"""By file name, in the order that a page shows them."""


def draw_plots(analysis: RewardAnalysis) -> dict[str, bytes]:
    """Each plot as PNG by file name; one that has nothing to show is left out."""
    figures = {name: draw(analysis) for name, draw in PLOTS.items()}
    return {name: png_of(figure) for name, figure in figures.items() if figure is not None}
