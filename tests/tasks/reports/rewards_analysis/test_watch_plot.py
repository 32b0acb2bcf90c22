import io

import pytest
from PIL import Image

from tasks.reports.rewards_analysis.watch_plot import draw_watch, normalised


def test_guardrails_are_multiples_of_their_first_value() -> None:
    assert normalised([None, 4.0, None, 2.0, 8.0]) == [None, 1.0, None, 0.5, 2.0]
    assert normalised([-2.0, -1.0]) == [1.0, 0.5]
    assert normalised([0.0, 1.0]) is None
    assert normalised([None, None]) is None


def test_the_image_depends_on_what_was_measured() -> None:
    contents = []
    for last in (0.5, 0.5, 2.0):
        guardrails = {"sharpness": [1.0, None, last], "$zero": [0.0, 0.0, 1.0], "_none": [None] * 3}
        contents.append(draw_watch([0, 1, 2], [0.1, 0.2, None], guardrails))
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("rewards", [[0.5], [None]])
def test_a_single_version_without_guardrails(rewards: list[float | None]) -> None:
    with Image.open(io.BytesIO(draw_watch([3], rewards, {}))) as image:
        assert image.width > 600


def test_series_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="sharpness: expected a value for each of 2 versions, got 1"):
        draw_watch([0, 1], [0.1, 0.2], {"sharpness": [1.0]})
    with pytest.raises(ValueError, match="rewards: expected a value for each of 0 versions"):
        draw_watch([], [], {})
