"""Reward against guardrails over policy versions: a reward that rises while they fall is being hacked."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.reports.rewards_analysis.figures import (
    INK,
    SOFT,
    colour_of,
    headline,
    markers,
    new_figure,
    png_of,
    quiet,
    whole_numbers,
    written,
)
from tasks.reports.rewards_analysis.side_labels import label_ends

Series = Sequence[float | None]

UPPER, LOWER = 1.9, 3.4


def draw_watch(versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series]) -> bytes:
    """The reward above, and below it each guardrail as a multiple of its first value; a PNG.

    A guardrail whose first value is zero has no multiple, nor has one without values: their names stand below.

    Args:
        versions: of the policy, rising.
        rewards: held-out reward of each version; None where there is none.
        guardrails: values of each version by name, higher being better.

    Raises:
        ValueError: there are no versions, or a series has another number of values.
    """
    for name, series in {"rewards": rewards, **guardrails}.items():
        if len(series) != len(versions) or not versions:
            raise ValueError(f"{name}: expected a value for each of {len(versions)} versions, got {len(series)}")
    return png_of(_draw(versions, rewards, guardrails))


def normalised(series: Series) -> list[float | None] | None:
    """Multiples of the first value that there is; None where that is zero, or where there is none."""
    first = next((value for value in series if value is not None), None)
    if not first:
        return None
    return [None if value is None else value / first for value in series]


def _draw(versions: Sequence[int], rewards: Series, guardrails: Mapping[str, Series]) -> Figure:
    multiples = {name: normalised(series) for name, series in guardrails.items()}
    drawn = {name: series for name, series in multiples.items() if series is not None}
    left_out = [written(name) for name in guardrails if name not in drawn]
    lower = LOWER + 0.2 * max(0, len(drawn) - 14)
    figure = new_figure(10.5, UPPER + lower + 0.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[UPPER, lower])
    _draw_reward(above, versions, rewards)
    _draw_guardrails(below, versions, drawn)
    label_ends(below, _ends(drawn), inches=lower - 0.4)
    if len(versions) > 1:
        above.xaxis.set_major_locator(whole_numbers(10))
    else:
        above.set_xticks(versions)
    below.set_xlabel("policy version", fontsize=9, color=SOFT)
    note = f"; begin at zero or have no values: {', '.join(left_out)}" if left_out else ""
    headline(figure, "Held-out reward and guardrails", f"guardrails as multiples of their first value{note}")
    return figure


def _draw_reward(axes: Axes, versions: Sequence[int], rewards: Series) -> None:
    quiet(axes, grid="y")
    _line(axes, versions, rewards, INK, width=2.4)
    axes.margins(x=0.02, y=0.15)
    axes.set_ylabel("held-out reward", fontsize=9, color=SOFT)
    last = next((value for value in reversed(rewards) if value is not None), None)
    if last is not None:
        label_ends(axes, [(last, f"reward  {last:.3f}", INK)], inches=UPPER)


def _draw_guardrails(axes: Axes, versions: Sequence[int], drawn: Mapping[str, Series]) -> None:
    quiet(axes, grid="y")
    axes.axhline(1.0, color=SOFT, linewidth=1, linestyle="--")
    for index, series in enumerate(drawn.values()):
        _line(axes, versions, series, colour_of(index), width=1.8)
    axes.margins(x=0.02, y=0.06)
    axes.set_ylabel("guardrail / its first value", fontsize=9, color=SOFT)


def _line(axes: Axes, versions: Sequence[int], series: Series, colour: str, *, width: float) -> None:
    points = [(version, value) for version, value in zip(versions, series, strict=True) if value is not None]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linewidth=width, marker=markers(len(points)), markersize=3.5)


def _ends(drawn: Mapping[str, Series]) -> list[tuple[float, str, str]]:
    ends = []
    for index, (name, series) in enumerate(drawn.items()):
        last = next(value for value in reversed(series) if value is not None)
        ends.append((last, f"{written(name)}  ×{last:.2f}", colour_of(index)))
    return ends
