"""Geometry of a line chart: where lines, points and ticks go. The page draws it, in the colours of its theme."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]

LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 22.0
MAX_DOTS = 60
"""A longer line is drawn without its points."""


@dataclass(frozen=True)
class Tick:
    """A label on an axis.

    Attributes:
        at: its pixel.
        label: its number.
    """

    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A measured point.

    Attributes:
        x: pixel.
        y: pixel.
        label: what it says when pointed at.
    """

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        name: of the series.
        path: of an SVG polyline, pixels.
        dots: its points; the last one alone where there are many.
        last: its last value, written out.
    """

    name: str
    path: str
    dots: tuple[Dot, ...]
    last: str


@dataclass(frozen=True)
class Chart:
    """A line chart, ready to be drawn.

    Attributes:
        title: in plain words.
        meaning: a sentence.
        width: pixels.
        height: pixels.
        lines: in the order given; never empty.
        rows: ticks of the value axis, pixels from the top.
        columns: ticks of the iteration axis.
        legend: the lines' names tell what the title does not.
    """

    title: str
    meaning: str
    width: float
    height: float
    lines: tuple[Line, ...]
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    legend: bool

    @property
    def inner(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom of the area that lines are drawn in."""
        return LEFT, self.width - RIGHT, TOP, self.height - BOTTOM


def line_chart(
    title: str,
    meaning: str,
    series: Mapping[str, Points],
    *,
    width: float = 360.0,
    height: float = 170.0,
    legend: bool = False,
) -> Chart | None:
    """Lay out a chart; None without any point.

    Args:
        title: in plain words.
        meaning: a sentence.
        series: (iteration, value) points by name, in the order of the iterations; all finite.
        width: pixels.
        height: pixels.
        legend: whether the lines' names are written out.
    """
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return None
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    rows = nice_ticks(min(ys), max(ys), 3)
    low, high = min(rows[0], *ys), max(rows[-1], *ys)
    columns = [tick for tick in nice_ticks(min(xs), max(xs), 5) if tick == int(tick) and min(xs) <= tick <= max(xs)]

    def across(x: float) -> float:
        share = (x - min(xs)) / (max(xs) - min(xs)) if max(xs) > min(xs) else 0.5
        return round(LEFT + 4 + share * (width - LEFT - RIGHT - 8), 1)

    def up(y: float) -> float:
        return round(height - BOTTOM - (y - low) / (high - low) * (height - TOP - BOTTOM), 1)

    def line(name: str, points: Points) -> Line:
        dots = tuple(Dot(across(x), up(y), f"{name}, iteration {x:g}: {y:.4g}") for x, y in points)
        path = " ".join(f"{dot.x:g},{dot.y:g}" for dot in dots)
        return Line(name, path, dots if len(dots) <= MAX_DOTS else dots[-1:], f"{points[-1][1]:.4g}")

    return Chart(
        title=title,
        meaning=meaning,
        width=width,
        height=height,
        lines=tuple(line(name, points) for name, points in drawn.items()),
        rows=tuple(Tick(up(tick), f"{tick:.4g}") for tick in rows),
        columns=tuple(Tick(across(tick), f"{tick:g}") for tick in columns or [xs[0]]),
        legend=legend,
    )


def nice_ticks(low: float, high: float, steps: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from at most `low` to at least `high`, about `steps` apart."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step)))
    return [round(index * step, decimals) + 0.0 for index in range(first, last + 1)]
