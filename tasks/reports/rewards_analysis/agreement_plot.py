"""How far rewards want the same: rank correlation over all samples, and within groups."""

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tasks.reports.layout import correlation
from tasks.reports.rewards_analysis.agreement import Agreement
from tasks.reports.rewards_analysis.figures import INK, SOFT, headline, new_figure, written
from tasks.reports.rewards_analysis.records import RewardAnalysis

Measure = Callable[[Agreement], float | None]


def draw_agreement(analysis: RewardAnalysis) -> Figure | None:
    """Two matrices side by side; None with fewer than two rewards."""
    count = len(analysis.rewards)
    if count < 2:
        return None
    side = 1.3 + 0.62 * count
    figure = new_figure(2 * side + 3.6, side + 2.25)
    panels = figure.subplots(1, 2, sharey=True)
    measures: tuple[tuple[str, Measure], ...] = (
        ("over all samples", lambda pair: pair.ranks.overall),
        ("within groups, mean: what a policy is taught", lambda pair: pair.ranks.within_groups),
    )
    for panel, (title, measure) in zip(panels, measures, strict=True):
        _draw(panel, analysis, title, measure)
    panels[1].tick_params(left=False)
    bar = figure.colorbar(panels[1].images[0], ax=list(panels), shrink=0.7, aspect=30, pad=0.01)
    bar.set_label("Spearman's rank correlation", fontsize=9, color=SOFT)
    bar.ax.tick_params(labelsize=8, colors=SOFT)
    bar.outline.set_visible(False)
    headline(figure, "Agreement between rewards", "1: the same order; 0: unrelated; -1: the reverse; –: not defined")
    return figure


def _draw(panel: Axes, analysis: RewardAnalysis, title: str, measure: Measure) -> None:
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
        said = "" if row == column else "–" if math.isnan(rho) else correlation(rho)
        colour = "white" if abs(rho) > 0.6 else INK
        if row == column:
            panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color="white"))
        panel.text(column, row, said, ha="center", va="center", fontsize=8.5, color=colour)
    names = [written(label, 24) for label in labels]
    panel.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=9)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.tick_params(length=0, colors=INK)
    panel.spines[:].set_visible(False)
    panel.set_title(title, fontsize=10, color=INK, loc="left")
