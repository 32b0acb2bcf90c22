"""Geometry of the charts of a comparison: where rectangles and ticks go. The page draws them in its theme's colours."""

import math
from dataclasses import dataclass

from tasks.reports.chart import Tick, nice_ticks
from tasks.reports.layout import counted
from tasks.reports.rescoring.joint import BINS, Axis, JointCounts

LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 40.0
FAINTEST = 0.18


@dataclass(frozen=True)
class Mark:
    """A rectangle, in pixels from the upper left.

    Attributes:
        strength: opacity, up to 1.
        label: what it says when pointed at.
    """

    x: float
    y: float
    width: float
    height: float
    strength: float
    label: str


@dataclass(frozen=True)
class RolloutPrefetcher:
    """A chart, ready to be drawn.

    Attributes:
        title: in plain words.
        meaning: a sentence.
        across: what the horizontal axis is.
        up: what the vertical axis is.
        width: pixels.
        height: pixels.
        marks: never empty.
        columns: ticks of the horizontal axis.
        rows: ticks of the vertical axis.
        series: which of the page's colours it takes.
    """

    title: str
    meaning: str
    across: str
    up: str
    width: float
    height: float
    marks: tuple[Mark, ...]
    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]
    series: int

    @property
    def inner(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom of the area that marks are drawn in."""
        return LEFT, self.width - RIGHT, TOP, self.height - BOTTOM


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, steps: int) -> tuple[Tick, ...]:
        inside = [tick for tick in nice_ticks(self.low, self.high, steps) if self.low <= tick <= self.high]
        return tuple(Tick(self.at(tick), f"{tick:.4g}") for tick in inside)


def scatter(joint: JointCounts, *, width: float = 560.0, height: float = 480.0) -> RolloutPrefetcher:
    """Previous against later reward, a cell of samples darker the more there are in it."""
    across, up = _across(joint.before, width), _Scale(*_padded(joint.after), height - BOTTOM, TOP)
    most = max(count for _, _, count in joint.cells)
    marks = []
    for before, after, count in joint.cells:
        left, right = (across.at(joint.before.edge(before + step)) for step in (0, 1))
        low, high = (up.at(joint.after.edge(after + step)) for step in (0, 1))
        wide, tall = max(right - left, 4.0), max(low - high, 4.0)
        strength = FAINTEST + (1 - FAINTEST) * math.log1p(count) / math.log1p(most)
        previous, later = _range(joint.before, before), _range(joint.after, after)
        label = f"{counted(count, 'sample')}: previous {previous}, later {later}"
        marks.append(Mark(left, high, round(wide, 2), round(tall, 2), round(strength, 2), label))
    return RolloutPrefetcher(
        title="Previous and later reward",
        meaning="darker where more samples lie; a narrow rising band means that the order was kept",
        across="previous reward",
        up="later reward",
        width=width,
        height=height,
        marks=tuple(marks),
        columns=across.ticks(6),
        rows=up.ticks(5),
        series=0,
    )


def histogram(joint: JointCounts, side: int, *, width: float = 560.0, height: float = 200.0) -> RolloutPrefetcher:
    """How many samples have which reward: 0 is the previous scoring, 1 the later."""
    axis, name = (joint.before, joint.after)[side], ("previous", "later")[side]
    counts = joint.marginal(side)
    across, up = _across(axis, width), _Scale(0, max(counts), height - BOTTOM, TOP)
    marks = []
    for index in range(BINS):
        if count := counts[index]:
            left, right = across.at(axis.edge(index)), across.at(axis.edge(index + 1))
            top = up.at(count)
            label = f"{counted(count, 'sample')}: {name} reward {_range(axis, index)}"
            wide = max(right - left - 1, 4.0)
            marks.append(Mark(left, top, round(wide, 2), round(height - BOTTOM - top, 2), 1.0, label))
    return RolloutPrefetcher(
        title=f"{name.capitalize()} reward",
        meaning="samples by reward",
        across=f"{name} reward",
        up="samples",
        width=width,
        height=height,
        marks=tuple(marks),
        columns=across.ticks(6),
        rows=tuple(tick for tick in up.ticks(3) if "." not in tick.label),
        series=side,
    )


def _range(axis: Axis, index: int) -> str:
    return f"{axis.edge(index):.3f} to {axis.edge(index + 1):.3f}"


def _across(axis: Axis, width: float) -> _Scale:
    return _Scale(*_padded(axis), LEFT, width - RIGHT)


def _padded(axis: Axis) -> tuple[float, float]:
    """The axis with some room at both ends, so that nothing lies on the frame."""
    room = (axis.high - axis.low) * 0.02 or abs(axis.low) * 0.1 or 1.0
    return axis.low - room, axis.high + room
