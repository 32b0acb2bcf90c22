import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tasks.reports.watch_plot import normalised, plot_watch, spread_apart


def test_guardrails_are_multiples_of_their_first_value() -> None:
    assert normalised([None, 4.0, None, 2.0, 8.0]) == [None, 1.0, None, 0.5, 2.0]
    assert normalised([-2.0, -1.0]) == [1.0, 0.5]
    assert normalised([0.0, 1.0]) is None
    assert normalised([None, None]) is None


def test_the_image_depends_on_what_was_measured() -> None:
    contents = []
    for last in (0.5, 0.5, 2.0):
        guardrails = {"sharpness": [1.0, None, last], "$zero": [0.0, 0.0, 1.0], "_none": [None] * 3}
        contents.append(plot_watch([0, 1, 2], [0.1, 0.2, None], guardrails))
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("rewards", [[0.5], [None]])
def test_a_single_version_without_guardrails(rewards: list[float | None]) -> None:
    with Image.open(io.BytesIO(plot_watch([3], rewards, {}))) as image:
        assert image.width > 600


def test_series_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="sharpness: expected a value for each of 2 versions, got 1"):
        plot_watch([0, 1], [0.1, 0.2], {"sharpness": [1.0]})
    with pytest.raises(ValueError, match="rewards: expected a value for each of 0 versions"):
        plot_watch([], [], {})


def test_labels_that_collide_share_the_room() -> None:
    assert spread_apart([0.5, 0.5, 0.9], gap=0.1) == pytest.approx([0.45, 0.55, 0.9])
    assert spread_apart([0.9, 0.1], gap=0.1) == pytest.approx([0.9, 0.1])
    assert spread_apart([], gap=0.1) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.2))
def test_labels_keep_their_order_and_their_distance(positions: list[float], gap: float) -> None:
    placed = spread_apart(positions, gap)
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    for previous, later in itertools.pairwise(order):
        assert placed[later] - placed[previous] >= gap - 1e-9
    # The least squares keep the mean.
    assert sum(placed) == pytest.approx(sum(positions))
