import json
import re

import pytest

from tasks.reports.curves import MAX_POINTS, Curve, iteration_ticks, line_plot
from tests.tasks.reports.test_run_page import Page


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.61, 0.76], [0.6, 0.65, 0.7, 0.75, 0.8]),
        ([5e-6, 2.95e-5, 1e-5], [0.0, 1e-5, 2e-5, 3e-5]),
        ([-1.0, 1e9, 1.0], [-5e8, 0.0, 5e8, 1e9]),
        ([0.0], [0.0, 0.5, 1.0]),
        ([7.0, 7.0], [6.0, 6.5, 7.0, 7.5, 8.0]),
        # Means that differ by the order of their sums.
        ([7.0, 7.000000000000001], [6.0, 6.5, 7.0, 7.5, 8.0]),
    ],
)
def test_points_lie_between_round_ticks_and_say_their_values(values: list[float], ticks: list[float]) -> None:
    plot = line_plot(Curve("t", "m", {"a <b>": list(enumerate(values, start=1)), "none": []}))
    assert plot is not None
    assert plot["lines"] == [("a <b>", f"{values[-1]:.4g}", 0)]
    page = Page(str(plot["svg"]))
    titles = [text for text in page.text if "iteration" in text]
    assert titles == [f"a <b>, iteration {at}: {value:.4g}" for at, value in enumerate(values, start=1)]
    places = [(float(each["cx"] or ""), float(each["cy"] or "")) for each in page.named("circle")]
    assert all(0 <= x <= 360 and 0 <= y <= 170 for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    # Higher values lie further up, so they have a smaller distance from the top.
    by_height = sorted(range(len(values)), key=lambda index: -places[index][1])
    assert [values[index] for index in by_height] == sorted(values)
    numbers = [float(text) for text in page.text if re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", text)]
    assert numbers[: len(ticks)] == pytest.approx(ticks)
    # The script finds the points again at the places that the data state.
    across, up, ((_, _, xs, ys, _),) = json.loads(page.named("svg")[0]["data-curve"] or "")
    for (low, start, high, end), found, side in ((across, xs, 0), (up, ys, 1)):
        placed = [start + (each - low) / (high - low) * (end - start) for each in found]
        assert placed == pytest.approx([place[side] for place in places], abs=0.06)


def test_ticks_of_iterations_are_integers_within_them() -> None:
    assert iteration_ticks(1, 3, 6) == [1, 2, 3]
    assert iteration_ticks(0, 500, 6) == [0, 100, 200, 300, 400, 500]
    assert iteration_ticks(7, 16, 6) == [8, 10, 12, 14, 16]


def test_long_lines_have_one_marker_and_not_every_point() -> None:
    plot = line_plot(Curve("t", "m", {"a": [(x, float(x)) for x in range(200)], "b": [(0, 1.0)]}))
    assert plot is not None
    page = Page(str(plot["svg"]))
    assert [each["class"] for each in page.named("circle")] == ["s0", "s1"]
    assert line_plot(Curve("t", "m", {"a": []})) is None
    long = line_plot(Curve("t", "m", {"a": [(x, float(x)) for x in range(5 * MAX_POINTS)]}))
    assert long is not None
    xs = json.loads(Page(str(long["svg"])).named("svg")[0]["data-curve"] or "")[2][0][2]
    assert len(xs) <= MAX_POINTS + 1
    assert (xs[0], xs[-1]) == (0, 5 * MAX_POINTS - 1)


def test_bands_enclose_their_line_and_widen_the_axis() -> None:
    band = [(1.0, -4.0, 0.5), (2.0, 0.25, 9.0)]
    plot = line_plot(Curve("t", "m", {"none": [], "a": [(1.0, 0.0), (2.0, 1.0)]}, bands={"a": [band]}))
    assert plot is not None
    page = Page(str(plot["svg"]))
    (area,) = [each["d"] or "" for each in page.named("path") if each["class"] == "band s1"]
    heights = [float(place.split()[1]) for place in re.findall(r"[\d.]+ [\d.]+", area)]
    first, second, *_ = [float(each["cy"] or "") for each in page.named("circle")]
    there, back = heights[:2], heights[:1:-1]
    assert there[0] < first < back[0]
    assert there[1] < second < back[1]
    _, up, ((*_, ranges),) = json.loads(page.named("svg")[0]["data-curve"] or "")
    assert (up[0], up[2]) == (-5, 10)
    assert ranges == [[[-4, 0.25], [0.5, 9]]]
