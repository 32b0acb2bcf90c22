"""Plots of pages as SVG: lines and bands over iterations, bars of a distribution, and squares of two.

They are written without Matplotlib, whose import and layout take seconds for a page of twenty curves: `grpo inspect
--watch` writes one every few seconds while a run works. From the points of curves page.js shows values.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from tasks.reports.text import counted, is_flat, visible

if TYPE_CHECKING:
    from tasks.reports.statistics import Histogram

Points = Sequence[tuple[float, float]]

Band = Sequence[tuple[float, float, float]]  # (iteration, lower end, upper end), in the order of the iterations


class Curve(NamedTuple):
    """Lines over iterations."""

    title: str  # what they show
    meaning: str  # what that means, for readers of a page
    series: Mapping[str, Points]  # finite (iteration, value) points by name, in the order of the iterations
    legend: bool = True
    bands: Mapping[str, Sequence[Band]] = {}  # shaded ranges by the name of their series, in its colour


COLOURS = 6  # classes of the style sheet for lines; the next series have them again, with dashes
MAX_MARKERS = 60  # a line of more points than this has no marker at each of them
MAX_POINTS = 2000  # points of a line; of more, some that are evenly spaced and the last
LETTER, TOP, RIGHT, BOTTOM = 6.0, 8, 9, 22  # width of a digit on an axis, and margins, in pixels
FAINTEST = 0.18  # opacity of a square with the fewest samples


class _Scale(NamedTuple):
    """Two values and their places in pixels."""

    low: float
    start: float
    high: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_plot(curve: Curve, *, width: int = 360, height: int = 170) -> dict[str, Any] | None:
    """Plot lines and bands over iterations, in pixels: SVG, texts, and name, last value and colour of each line.

    None without any point. A series keeps its colour where others have no points.
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
    first = min(points[0][0] for _, points in series.values())
    last = max(points[-1][0] for _, points in series.values())
    # A single iteration stands in the middle.
    low, high = (first, last) if first < last else (first - 1, last + 1)
    across, up = _scales(low, high, ticks, width, height)
    parts = [*_grid(across, up, iteration_ticks(low, high, 6 if width < 600 else 12), ticks, width)]
    drawn = []
    for name, (index, points) in series.items():
        parts += [_area(band, across, up, index) for band in bands[name]]
        parts += _line(visible(name), points, across, up, index)
        ranges = [[[*map(_short, ends)] for ends in zip(*band, strict=True)][1:] for band in bands[name]]
        columns = [[*map(_short, values)] for values in zip(*points, strict=True)]
        drawn.append([visible(name), index % COLOURS, *columns, ranges])
    data = json.dumps([[round(each, 6) for each in across], list(up), drawn], ensure_ascii=False, separators=(",", ":"))
    svg = _svg(f"{curve.title} over iterations", parts, width, height, f' data-curve="{escape(data)}"')
    return {
        "title": curve.title,
        "meaning": curve.meaning,
        "lines": [(name, f"{points[-1][1]:.4g}", index % COLOURS) for name, (index, points) in series.items()],
        "svg": svg,
        "legend": curve.legend,
    }


def bar_plot(histogram: "Histogram", name: str, *, series: int = 0) -> Markup:
    """Plot how many samples have which reward, in the colour of this series; the histogram is counts and edges."""
    (counts, edges), (width, height) = histogram, (560, 195)
    ticks = value_ticks(0.0, float(max(counts)), count=min(3, int(max(counts))))
    across, up = _scales(edges[0], edges[-1], ticks, width, height)
    parts = [*_grid(across, up, _ticks_within(edges[0], edges[-1]), ticks, width)]
    for x, count in zip(itertools.pairwise(edges), counts, strict=True):
        said = f"{counted(int(count), 'sample')}: {name} {x[0]:.3f} to {x[1]:.3f}"
        parts += [_square(x, (0.0, float(count)), across, up, series, said)] if count else []
    return _svg(name.capitalize(), parts, width, height)


def joint_plot(counts: Sequence[Sequence[float]], rows: Sequence[float], columns: Sequence[float]) -> Markup:
    """Plot previous against later rewards, one square per bin of both edges, darker where more samples lie."""
    most, width, height = max(map(max, counts)), 560, 475
    ticks = _ticks_within(columns[0], columns[-1])
    across, up = _scales(rows[0], rows[-1], ticks, width, height, (columns[0], columns[-1]))
    parts = [*_grid(across, up, _ticks_within(rows[0], rows[-1]), ticks, width)]
    for x, line in zip(itertools.pairwise(rows), counts, strict=True):
        for y, count in zip(itertools.pairwise(columns), line, strict=True):
            said = f"{counted(int(count), 'sample')}: previous {x[0]:.3f} to {x[1]:.3f}, later {y[0]:.3f} to {y[1]:.3f}"
            opacity = FAINTEST + (1 - FAINTEST) * math.log1p(count) / math.log1p(most)
            parts += [_square(x, y, across, up, 0, said, opacity)] if count else []
    return _svg("Previous and later reward", parts, width, height)


def _svg(label: str, parts: Iterable[str], width: int, height: int, data: str = "") -> Markup:
    named = f'role="img" aria-label="{escape(visible(label))}"'
    return Markup(f'<svg viewBox="0 0 {width} {height}" {named}{data}>{"".join(parts)}</svg>')


def _square(
    x: tuple[float, float],
    y: tuple[float, float],
    across: _Scale,
    up: _Scale,
    series: int,
    said: str,
    opacity: float = 1.0,
) -> str:
    left, right, bottom, top = *map(across.place, x), *map(up.place, y)
    place = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
    title = escape(visible(said))
    return f'<rect class="s{series}" fill-opacity="{opacity:.2f}" {place}><title>{title}</title></rect>'


def _scales(
    low: float, high: float, ticks: Sequence[float], width: int, height: int, ends: tuple[float, float] | None = None
) -> tuple[_Scale, _Scale]:
    """Place the values from `low` to `high` across, right of the labels of these ticks, which `ends` lie around."""
    bottom, top = ends or (ticks[0], ticks[-1])
    left = LETTER * max(len(f"{tick:.4g}") for tick in ticks) + 8
    return _Scale(low, left + 6, high, width - RIGHT), _Scale(bottom, height - BOTTOM, top, TOP)


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


def _ticks_within(low: float, high: float) -> list[float]:
    """Choose about five round values from `low` to `high`."""
    return [tick for tick in value_ticks(low, high, 5) if low <= tick <= high]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((each * power for each in (1, 2, 5) if each * power >= least * (1 - 1e-9)), 10 * power)


def _tick(step: float, number: int) -> float:
    return float(f"{step * number:.10g}")


def _grid(across: _Scale, up: _Scale, x_ticks: Iterable[float], y_ticks: Iterable[float], width: int) -> Iterator[str]:
    for tick in y_ticks:
        y = up.place(tick)
        yield f'<path class="grid" d="M{across.start - 6:.1f} {y:.1f}H{width - 1}"/>'
        yield f'<text x="{across.start - 11:.1f}" y="{y + 3.6:.1f}" text-anchor="end">{tick:.4g}</text>'
    for tick in x_ticks:
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


def _short(value: float) -> float:
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
