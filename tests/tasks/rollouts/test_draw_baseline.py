"""The blank image has the colour of the target's background."""

from pathlib import Path

from PIL import Image

from data.shapes import BACKGROUNDS
from tasks.rollouts.draw_baseline import background

TARGETS = Path(__file__).resolve().parents[3] / "data" / "targets"


def test_the_border_decides_and_of_two_colours_the_darker_one() -> None:
    files = sorted(TARGETS.glob("*.png"))
    assert files
    for file in files:
        with Image.open(file) as target:
            assert background(target) == BACKGROUNDS[file.stem.rpartition("-")[2]]
    framed = Image.new("RGB", (9, 7), (200, 0, 0))
    framed.paste((0, 0, 9), (1, 1, 8, 6))
    assert background(framed) == (200, 0, 0)
    halves = Image.new("RGB", (4, 4), (10, 200, 200))
    halves.paste((10, 199, 255), (0, 0, 2, 4))
    assert background(halves) == (10, 199, 255)
