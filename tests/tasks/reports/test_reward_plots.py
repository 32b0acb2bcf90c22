import io

import pytest
from PIL import Image

from tasks.reports.reward_plots import normalised, plot_guardrails, plot_label


def test_labels_are_text_and_nothing_else() -> None:
    assert plot_label("a$b$") == r"a\$b\$"
    assert plot_label("报\n") == "\N{REPLACEMENT CHARACTER}" * 2
    assert plot_label("a" * 40 + "z", 10) == "aaaaaa…aaz"


def test_guardrails_are_multiples_of_their_first_value() -> None:
    assert normalised([None, 4.0, None, 2.0, 8.0]) == [None, 1.0, None, 0.5, 2.0]
    assert normalised([-2.0, -1.0]) == [1.0, 0.5]
    assert normalised([0.0, 1.0]) is None
    assert normalised([None, None]) is None


def test_the_image_depends_on_what_was_measured() -> None:
    contents = []
    for last in (0.5, 0.5, 2.0):
        guardrails = {"sharpness": [1.0, None, last], "$zero": [0.0, 0.0, 1.0], "_none": [None] * 3}
        contents.append(plot_guardrails([0, 1, 2], [0.1, 0.2, None], guardrails))
    assert contents[0] == contents[1] != contents[2]
    with Image.open(io.BytesIO(contents[0])) as image:
        # Nor on what made it.
        assert not image.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("rewards", [[0.5], [None]])
def test_a_single_version_without_guardrails(rewards: list[float | None]) -> None:
    with Image.open(io.BytesIO(plot_guardrails([3], rewards, {}))) as image:
        assert image.width > 600
