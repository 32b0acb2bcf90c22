"""A picture is read as the caption whose drawing is nearest."""

import numpy as np
import pytest
from PIL import Image

from data.shapes import Scene, all_scenes, draw, draw_cells
from data.tiny_glm_image.evaluation import nearest_scene


@pytest.mark.parametrize("scene", all_scenes()[::37])
def test_a_drawing_is_read_as_its_own_scene_through_noise(scene: Scene) -> None:
    noise = np.random.default_rng(0).normal(scale=12, size=(64, 64, 3))
    noisy = np.clip(np.asarray(draw(scene)) + noise, 0, 255).astype(np.uint8)
    assert nearest_scene(Image.fromarray(noisy)) == scene


def test_one_cell_off_is_still_the_same_corner() -> None:
    scene = Scene("red", "cross", "bottom left", "white")
    cells = draw_cells(scene, origin=(2, 0))
    slipped = Image.fromarray(cells.repeat(8, axis=0).repeat(8, axis=1))
    found = nearest_scene(slipped)
    assert (found.color, found.position, found.background) == ("red", "bottom left", "white")
