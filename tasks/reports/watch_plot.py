"""Reward against guardrails over policy versions: a reward that rises while they fall is being hacked."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from tasks.reports.plots import (
    INK,
    SOFT,
    colour_of,
    headline,
    integer_ticks,
    markers,
    new_figure,
    plot_label,
    png_of,
    quiet,
)

Series = Sequence[float | None]

UPPER, LOWER = 1.9, 3.4
"""Heights of the two panels in inches."""


def plot_watch(versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series]) -> bytes:
    """Plot the reward above, and below it each guardrail as a multiple of its first value, as PNG.

    A guardrail without values, or whose first value is zero, has no multiple and is named below the plot.

    Args:
        versions: policy versions, ascending.
        rewards: held-out reward of each version; None where there is none.
        guardrails: values of each version by name, higher being better.

    Raises:
        ValueError: there are no versions, or a series has another number of values.
    """
    for name, series in {"rewards": rewards, **guardrails}.items():
        if len(series) != len(versions) or not versions:
            raise ValueError(f"{name}: expected a value for each of {len(versions)} versions, got {len(series)}")
    multiples = {name: normalised(series) for name, series in guardrails.items()}
    plotted = {name: series for name, series in multiples.items() if series is not None}
    left_out = [plot_label(name) for name in guardrails if name not in plotted]
    lower = LOWER + 0.2 * max(0, len(plotted) - 14)
    figure = new_figure(10.5, UPPER + lower + 0.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[UPPER, lower])
    _plot_reward(above, versions, rewards)
    _plot_guardrails(below, versions, plotted, lower)
    if len(versions) > 1:
        above.xaxis.set_major_locator(integer_ticks(10))
    else:
        above.set_xticks(versions)
    note = f"; begin at zero or have no values: {', '.join(left_out)}" if left_out else ""
    headline(figure, "Held-out reward and guardrails", f"guardrails as multiples of their first value{note}")
    return png_of(figure)


def normalised(series: Series) -> list[float | None] | None:
    """Divide a series by its first value; None where that is zero, or where there is none."""
    first = next((value for value in series if value is not None), None)
    if not first:
        return None
    return [None if value is None else value / first for value in series]


def _plot_reward(axes: Axes, versions: Sequence[int], rewards: Series) -> None:
    quiet(axes, grid="y")
    last = _line(axes, versions, rewards, INK, width=2.4)
    axes.margins(x=0.02, y=0.15)
    axes.set_ylabel("held-out reward", fontsize=9, color=SOFT)
    if last is not None:
        label_ends(axes, [(last, f"reward  {last:.3f}", INK)], inches=UPPER)


def _plot_guardrails(axes: Axes, versions: Sequence[int], guardrails: Mapping[str, Series], inches: float) -> None:
    quiet(axes, grid="y")
    axes.axhline(1.0, color=SOFT, linewidth=1, linestyle="--")
    ends = []
    for index, (name, series) in enumerate(guardrails.items()):
        last = _line(axes, versions, series, colour_of(index), width=1.8)
        if last is not None:
            ends.append((last, f"{plot_label(name)}  ×{last:.2f}", colour_of(index)))
    axes.margins(x=0.02, y=0.06)
    axes.set_ylabel("guardrail / its first value", fontsize=9, color=SOFT)
    axes.set_xlabel("policy version", fontsize=9, color=SOFT)
    label_ends(axes, ends, inches=inches - 0.4)


def _line(axes: Axes, versions: Sequence[int], series: Series, colour: str, *, width: float) -> float | None:
    """Plot the values that there are, and return the last one."""
    points = [(version, value) for version, value in zip(versions, series, strict=True) if value is not None]
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=colour, linewidth=width, marker=markers(len(points)), markersize=3.5)
    return points[-1][1]


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], *, inches: float) -> None:
    """Write each line's name to the right of the axes, as close to the height of its end as the other names allow.

    Args:
        axes: with their final vertical limits.
        ends: value of the line's end, name and colour.
        inches: height of the axes, about.
    """
    low, high = axes.get_ylim()
    shares = [(value - low) / (high - low) for value, _, _ in ends]
    arrow = {"arrowstyle": "-", "linewidth": 0.7, "alpha": 0.6, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0}
    for share, height, (_, name, colour) in zip(shares, spread_apart(shares, gap=0.17 / inches), ends, strict=True):
        axes.annotate(
            name,
            xy=(1.0, share),
            xytext=(1.05, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={**arrow, "color": colour},
            annotation_clip=False,
        )


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as needed to be at least `gap` apart, in the same order.

    Those that collide share the room around their mean: isotonic regression of the positions minus their gaps.
    """
    if not positions:
        return []
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    bases = isotonic_regression([positions[index] - rank * gap for rank, index in enumerate(order)]).x
    placed = [0.0] * len(positions)
    for rank, (index, base) in enumerate(zip(order, bases, strict=True)):
        placed[index] = float(base) + rank * gap
    return placed
