import polars as pl
import pytest

from tasks.reports.rescoring.drawings import BOTTOM, LEFT, RIGHT, TOP, histogram, scatter
from tasks.reports.rescoring.joint import JointCounts, joint_counts


def joint(before: list[float], after: list[float]) -> JointCounts:
    return joint_counts(pl.DataFrame({"x": before, "y": after}), "x", "y")


def test_later_is_up_and_former_is_right_and_more_is_darker() -> None:
    low, high = scatter(joint([0.0, 1.0, 1.0], [-1.0, 3.0, 3.0])).marks
    assert low.x < high.x
    assert low.y > high.y
    assert low.strength < high.strength == 1.0
    assert low.label == "1 sample: previous 0.000 to 0.025, later -1.000 to -0.900"


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [-3.0, 4.0, 1e-9], [1e6, 2e6]])
def test_every_mark_is_inside(values: list[float]) -> None:
    counts = joint(values, values)
    for prefetching in (scatter(counts), histogram(counts, 0), histogram(counts, 1)):
        for mark in prefetching.marks:
            assert LEFT <= mark.x <= mark.x + mark.width <= prefetching.width - RIGHT + 0.1
            assert TOP - 0.1 <= mark.y <= mark.y + mark.height <= prefetching.height - BOTTOM + 0.1
        for tick in prefetching.columns:
            assert LEFT <= tick.at <= prefetching.width - RIGHT


def test_bars_are_as_high_as_their_counts() -> None:
    one, three = histogram(joint([0.0, 1.0, 1.0, 1.0], [0.0] * 4), 0).marks
    assert three.height == pytest.approx(3 * one.height, abs=0.1)
    assert one.x < three.x
