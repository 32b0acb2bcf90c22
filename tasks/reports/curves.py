"""Curves of pages as SVG: lines and bands over iterations, with the points from which page.js shows values.

They are written without Matplotlib, whose import and layout take seconds for a page of twenty curves: `grpo inspect
--watch` writes one every few seconds while a run works.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from tasks.reports.text import is_flat, visible

Points = Sequence[tuple[float, float]]

Band = Sequence[tuple[float, float, float]]
"""(iteration, lower end, upper end), in the order of the iterations."""


class Curve(NamedTuple):
    """Lines over iterations.

    Attributes:
        title: what they show.
        meaning: what that means, for readers of a page.
        series: finite (iteration, value) points by name, in the order of the iterations.
        legend: whether its lines need a legend.
        bands: shaded ranges by the name of their series, in its colour.
    """

    title: str
    meaning: str
    series: Mapping[str, Points]
    legend: bool = True
    bands: Mapping[str, Sequence[Band]] = {}


COLOURS = 6
"""Classes of the style sheet for lines; the next series have them again, with dashes."""

MAX_MARKERS = 60
"""A line of more points than this has no marker at each of them."""

MAX_POINTS = 2000
"""Points of a line; of more, some that are evenly spaced and the last."""

LETTER, TOP, RIGHT, BOTTOM = 6.0, 8, 9, 22
"""Width of a digit on an axis, and margins, in pixels."""


class _Scale(NamedTuple):
    """Two values and their places in pixels."""

    low: float
    start: float
    high: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_plot(curve: Curve, *, width: int = 360, height: int = 170) -> dict[str, Any] | None:
    """Plot lines and bands over iterations; None without any point. The size is in pixels.

    Returns:
        The title, the meaning, and whether the page writes a legend; the plot as `svg`; and in `lines` the name, the
        last value and the number of the colour of each line. A series keeps its colour where others have no points.
    """
    series = {
        name: (index, _thinned(points)) for index, (name, points) in enumerate(curve.series.items()) if len(points)
    }
    if not series:
        return None
    bands = {name: [_thinned(band) for band in curve.bands.get(name, ())] for name in series}
    values = [y for _, points in series.values() for _, y in points]
    values += [end for each in bands.values() for band in each for _, *ends in band for end in ends]
    ticks = value_ticks(min(values), max(values))
    labels = [f"{tick:.4g}" for tick in ticks]
    left = LETTER * max(map(len, labels)) + 8
    first = min(points[0][0] for _, points in series.values())
    last = max(points[-1][0] for _, points in series.values())
    # A single iteration stands in the middle.
    low, high = (first, last) if first < last else (first - 1, last + 1)
    across = _Scale(low, left + 6, high, width - RIGHT)
    up = _Scale(ticks[0], height - BOTTOM, ticks[-1], TOP)
    parts = [*_grid(across, up, ticks, labels, width)]
    drawn = []
    for name, (index, points) in series.items():
        parts += [_area(band, across, up, index) for band in bands[name]]
        parts += _line(visible(name), points, across, up, index)
        ranges = [[[*map(_short, ends)] for ends in zip(*band, strict=True)][1:] for band in bands[name]]
        drawn.append([visible(name), index % COLOURS, *map(_numbers, zip(*points, strict=True)), ranges])
    data = json.dumps([[round(each, 6) for each in across], list(up), drawn], ensure_ascii=False, separators=(",", ":"))
    label = f"{visible(curve.title)} over iterations"
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" data-curve="{escape(data)}">'
        f"{''.join(parts)}</svg>"
    )
    return {
        "title": curve.title,
        "meaning": curve.meaning,
        "lines": [(name, f"{points[-1][1]:.4g}", index % COLOURS) for name, (index, points) in series.items()],
        "svg": Markup(svg),
        "legend": curve.legend,
    }


def value_ticks(low: float, high: float, count: int = 3) -> list[float]:
    """Choose about `count` round steps from below the least to above the largest value."""
    if is_flat(low, high):
        margin = abs(low) * 0.1
        low, high = (low - margin, high + margin) if low else (0.0, 1.0)
    step = _round_step((high - low) / count)
    return [_tick(step, each) for each in range(math.floor(low / step), math.ceil(high / step) + 1)]


def iteration_ticks(first: float, last: float, count: int) -> list[float]:
    """Choose at most about `count` round integers from the first to the last iteration."""
    step = max(1.0, _round_step((last - first) / count))
    return [_tick(step, each) for each in range(math.ceil(first / step), math.floor(last / step) + 1)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((each * power for each in (1, 2, 5) if each * power >= least * (1 - 1e-9)), 10 * power)


def _tick(step: float, number: int) -> float:
    return float(f"{step * number:.10g}")


def _grid(across: _Scale, up: _Scale, ticks: Sequence[float], labels: Sequence[str], width: int) -> Iterator[str]:
    for tick, label in zip(ticks, labels, strict=True):
        y = up.place(tick)
        yield f'<path class="grid" d="M{across.start - 6:.1f} {y:.1f}H{width - 1}"/>'
        yield f'<text x="{across.start - 11:.1f}" y="{y + 3.6:.1f}" text-anchor="end">{label}</text>'
    for tick in iteration_ticks(across.low, across.high, 6 if width < 600 else 12):
        yield f'<text x="{across.place(tick):.1f}" y="{up.start + 15:.1f}" text-anchor="middle">{tick:g}</text>'


def _line(name: str, points: Points, across: _Scale, up: _Scale, index: int) -> Iterator[str]:
    colour, dashes = f"s{index % COLOURS}", index // COLOURS % 3
    path = "L".join(f"{across.place(x):.1f} {up.place(y):.1f}" for x, y in points)
    yield f'<path class="line {colour}{f" dash{dashes}" if dashes else ""}" d="M{path}"/>'
    for x, y in points if len(points) <= MAX_MARKERS else points[-1:]:
        title = escape(f"{name}, iteration {x:g}: {y:.4g}")
        place = f'cx="{across.place(x):.1f}" cy="{up.place(y):.1f}"'
        yield f'<circle class="{colour}" {place} r="2.2"><title>{title}</title></circle>'


def _area(band: Band, across: _Scale, up: _Scale, index: int) -> str:
    there = [f"{across.place(x):.1f} {up.place(high):.1f}" for x, _, high in band]
    back = [f"{across.place(x):.1f} {up.place(low):.1f}" for x, low, _ in reversed(band)]
    return f'<path class="band s{index % COLOURS}" d="M{"L".join([*there, *back])}Z"/>' if band else ""


def _thinned(points: Sequence[Any]) -> Sequence[Any]:
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _numbers(values: Sequence[float]) -> list[float]:
    return [_short(value) for value in values]


def _short(value: float) -> float:
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
