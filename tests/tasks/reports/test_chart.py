import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reports.chart import BOTTOM, LEFT, RIGHT, TOP, line_chart, nice_ticks


@pytest.mark.parametrize(
    ("low", "high", "steps", "ticks"),
    [
        (0.6, 0.76, 3, [0.6, 0.7, 0.8]),
        (0.0, 20.0, 5, [0.0, 5.0, 10.0, 15.0, 20.0]),
        (5e-6, 2.95e-5, 3, [0.0, 1e-5, 2e-5, 3e-5]),
        (-1.0, 1.0, 2, [-1.0, 0.0, 1.0]),
        (0.0, 0.0, 2, [-1.0, 0.0, 1.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, steps: int, ticks: list[float]) -> None:
    assert nice_ticks(low, high, steps) == pytest.approx(ticks)


finite = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-9)


@given(finite, finite)
def test_ticks_enclose_the_values_and_stay_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, 4)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert ticks == sorted(ticks)
    assert len(ticks) <= 7


@given(st.lists(finite, min_size=1, max_size=30))
def test_every_point_is_inside(values: list[float]) -> None:
    chart = line_chart("t", "m", {"s": [(float(x), y) for x, y in enumerate(values, start=1)]}, width=300, height=150)
    assert chart is not None
    for dot in chart.lines[0].dots:
        assert LEFT <= dot.x <= 300 - RIGHT
        assert TOP - 0.1 <= dot.y <= 150 - BOTTOM + 0.1


def test_higher_is_higher_and_later_is_further_right() -> None:
    chart = line_chart("t", "m", {"a": [(1, 0.0), (2, 1.0)], "b": [(0, 0.5)], "c": []})
    assert chart is not None
    assert [line.name for line in chart.lines] == ["a", "b"]
    first, second = chart.lines[0].dots
    assert second.y < chart.lines[1].dots[0].y < first.y
    assert chart.lines[1].dots[0].x < first.x < second.x
    assert second.label == "a, iteration 2: 1"


def test_nothing_to_draw() -> None:
    assert line_chart("t", "m", {"a": []}) is None


def test_a_long_line_has_no_dots_but_its_last() -> None:
    chart = line_chart("t", "m", {"a": [(float(x), float(x)) for x in range(1000)]})
    assert chart is not None
    (dot,) = chart.lines[0].dots
    assert dot.label == "a, iteration 999: 999"
    assert len(chart.lines[0].path.split()) == 1000
