import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tasks.reports.curve import curve_svg

SVG = "{http://www.w3.org/2000/svg}"


def lines(prefetching: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(prefetching).iter(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in found]  # type: ignore[misc]


def words(prefetching: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(prefetching).iter(f"{SVG}text")]


def test_later_is_further_right_and_higher_is_higher() -> None:
    (first, second) = lines(curve_svg({"reward": [(1, 0.0), (2, 1.0), (3, 0.5)], "held-out": [(0, 0.25)]}))
    low, high, middle = first
    assert low[0] < high[0] < middle[0]
    assert high[1] < middle[1] < low[1]
    assert middle[1] == (low[1] + high[1]) / 2
    assert second[0][0] < low[0]
    assert middle[1] < second[0][1] < low[1]


def test_the_range_and_the_last_value_of_each_are_written_out() -> None:
    said = words(curve_svg({"reward": [(1, 0.25), (7, 0.75)], "held-out": []}))
    assert said == ["0.750", "0.250", "iteration 1 to 7", "reward 0.750"]


def test_one_point_is_a_drawing() -> None:
    assert len(lines(curve_svg({"reward": [(1, 0.5)]}))[0]) == 1


def test_a_name_is_data_and_a_long_one_stays_inside() -> None:
    prefetching = curve_svg({"</text><script>": [(1, 0.5)], "a" * 60: [(1, 0.5)]})
    assert not list(ElementTree.fromstring(prefetching).iter(f"{SVG}script"))
    *_, tagged, long = words(prefetching)
    assert tagged == "</text><script> 0.500"
    assert long == "a" * 15 + "… 0.500"


values = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(values, min_size=1, max_size=20), min_size=1, max_size=20))
def test_everything_lies_within_the_drawing(series: list[list[float]]) -> None:
    prefetching = curve_svg({f"s{index}": list(enumerate(map(float, ys))) for index, ys in enumerate(series)})
    root = ElementTree.fromstring(prefetching)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for x, y in [point for line in lines(prefetching) for point in line]:
        assert 0 <= x <= width
        assert 0 <= y <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("y", "")) <= height
