import json
import re

import numpy as np
import pytest

from tasks.reports.curves import FAINTEST, MAX_POINTS, Curve, bar_plot, iteration_ticks, joint_plot, line_plot
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


def test_bars_and_squares_count_as_numpy_does_and_stand_where_they_say() -> None:
    before, after = np.random.default_rng(1).normal(size=(2, 300))
    joint, rows, columns = np.histogram2d(before, after, bins=40)
    alone = [np.histogram(side, 40) for side in (before, after)]
    plots = [joint_plot(joint, rows, columns), bar_plot(alone[0], "a"), bar_plot(alone[1], "b", series=1)]
    pages = [Page(str(plot)) for plot in plots]
    said = [text for page in pages for text in page.text if "sample" in text and " to " in text]
    counts = [joint, alone[0][0], alone[1][0]]
    assert [int(text.split()[0]) for text in said] == [int(count) for side in counts for count in side.ravel() if count]
    i, j = np.argwhere(joint)[0]
    assert said[0].endswith(
        f"previous {rows[i]:.3f} to {rows[i + 1]:.3f}, later {columns[j]:.3f} to {columns[j + 1]:.3f}"
    )
    assert [{each["class"] for each in page.named("rect")} for page in pages] == [{"s0"}, {"s0"}, {"s1"}]
    squares, bars, _ = ([{key: each[key] for key in each} for each in page.named("rect")] for page in pages)
    # The highest bar has the largest count, and every one stands on the axis.
    heights = [float(each["height"] or "") for each in bars]
    known = [count for count in alone[0][0] if count]
    assert np.allclose(np.array(heights) / max(heights), np.array(known) / max(known), atol=0.01)
    assert {round(float(each["y"] or "") + float(each["height"] or ""), 1) for each in bars} == {173.0}
    opacities = [float(each["fill-opacity"] or "") for each in squares]
    assert max(opacities) == 1
    assert min(opacities) > FAINTEST
    places = [float(each["x"] or "") for each in squares]
    assert places == sorted(places)
