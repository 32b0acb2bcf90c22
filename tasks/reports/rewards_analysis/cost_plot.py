"""What each reward costs a sample."""

from matplotlib.figure import Figure

from tasks.reports.rewards_analysis.figures import COLOURS, INK, SOFT, headline, new_figure, quiet, written
from tasks.reports.rewards_analysis.records import RewardAnalysis

WIDE = 50
"""Times that the dearest reward costs the cheapest, beyond which the axis is logarithmic."""


def draw_cost(analysis: RewardAnalysis) -> Figure | None:
    """A bar a reward, the dearest on top, with a mark at the median and at what 95 % stay within; None without any."""
    costs = [(reward.label, reward.cost) for reward in analysis.rewards if reward.cost is not None]
    if not costs:
        return None
    costs.sort(key=lambda entry: entry[1].mean)
    figure = new_figure(9.0, 1.5 + 0.36 * len(costs))
    axes = figure.add_subplot()
    quiet(axes, grid="x")
    means = [cost.mean for _, cost in costs]
    places = range(len(costs))
    axes.barh(places, means, height=0.62, color=COLOURS[0], alpha=0.85)
    axes.scatter([cost.median for _, cost in costs], places, marker="|", s=130, color=INK, linewidth=1.6, zorder=3)
    axes.scatter([cost.p95 for _, cost in costs], places, marker="|", s=130, color=COLOURS[1], linewidth=1.6, zorder=3)
    positive = [mean for mean in means if mean > 0]
    if len(positive) == len(means) and max(means) > WIDE * min(means):
        axes.set_xscale("log")
    for place, (_, cost) in zip(places, costs, strict=True):
        end = max(cost.mean, cost.median, cost.p95)
        axes.annotate(
            f"{cost.mean:.3g} s", (end, place), (7, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK
        )
    axes.set_yticks(places, [written(label) for label, _ in costs], fontsize=9, color=INK)
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a sample", fontsize=9, color=SOFT)
    headline(figure, "Cost of each reward", "bar and number: mean; dark mark: median; orange mark: 95 % stay within")
    return figure
