"""An image is read as the caption that it shows, through noise and slips."""

import numpy as np
import pytest
from PIL import Image

from data.shapes import BACKGROUNDS, COLORS, SPRITES, Scene, all_scenes, cells_to_image, draw, draw_cells, sprite_origin
from data.tiny_glm_image.evaluation import read_scene


@pytest.mark.parametrize("scene", all_scenes()[::37])
def test_a_drawing_is_read_as_its_own_scene_through_noise(scene: Scene) -> None:
    noise = np.random.default_rng(0).normal(scale=12, size=(64, 64, 3))
    noisy = np.clip(np.asarray(draw(scene)) + noise, 0, 255).astype(np.uint8)
    assert read_scene(Image.fromarray(noisy)) == scene


@pytest.mark.parametrize("shape", SPRITES)
def test_one_cell_off_is_still_the_same_scene(shape: str) -> None:
    scene = Scene("red", shape, "bottom left", "white")
    row, column = sprite_origin(shape, "bottom left")
    assert read_scene(cells_to_image(draw_cells(scene, origin=(row - 1, column)))) == scene


def test_color_goes_by_votes_even_where_the_shape_is_gone() -> None:
    cells = np.tile(np.array(BACKGROUNDS["gray"], dtype=np.uint8), (8, 8, 1))
    cells[1, 1:6] = COLORS["purple"]
    cells[6, :4] = COLORS["pink"]
    found = read_scene(cells_to_image(cells))
    assert (found.color, found.background) == ("purple", "gray")
