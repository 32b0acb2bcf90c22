"""A caption has exactly one image, and no two captions share one."""

import numpy as np
import pytest

from data.shapes import BACKGROUNDS, COLORS, POSITIONS, SPRITES, Scene, all_scenes, draw, draw_cells, split_scenes


def covered(scene: Scene) -> list[str]:
    """The cells in the scene's colour, as text."""
    return ["".join("#" if tuple(cell) == COLORS[scene.color] else "." for cell in row) for row in draw_cells(scene)]


def test_cross_at_the_bottom_left() -> None:
    assert covered(Scene("red", "cross", "bottom left", "black")) == [
        "........",
        "........",
        "........",
        "..#.....",
        "..#.....",
        "#####...",
        "..#.....",
        "..#.....",
    ]


def test_triangle_in_the_center_stands_one_cell_off_where_the_grid_has_no_middle() -> None:
    assert covered(Scene("pink", "triangle", "center", "gray")) == [
        "........",
        "........",
        "...#....",
        "..###...",
        ".#####..",
        "........",
        "........",
        "........",
    ]


def test_cells_outside_the_sprite_have_the_background() -> None:
    cells = draw_cells(Scene("blue", "square", "top right", "gray"))
    assert (cells[:4, 4:] == COLORS["blue"]).all()
    cells[:4, 4:] = BACKGROUNDS["gray"]
    assert (cells == BACKGROUNDS["gray"]).all()


@pytest.mark.parametrize(
    ("scene", "caption"),
    [
        (Scene("red", "circle", "top left", "white"), "a red circle at the top left on a white background"),
        (Scene("orange", "heart", "center", "black"), "an orange heart in the center on a black background"),
    ],
)
def test_caption(scene: Scene, caption: str) -> None:
    assert scene.caption == caption


def test_captions_are_distinct_and_any_two_images_differ_in_four_cells_or_more() -> None:
    scenes = all_scenes()
    assert len({scene.caption for scene in scenes}) == len(scenes)
    assert len(scenes) == len(COLORS) * len(SPRITES) * len(POSITIONS) * len(BACKGROUNDS)
    # A cell's colour as one number, so that cells compare at once.
    cells = np.stack([draw_cells(scene) for scene in scenes]).astype(np.int64) @ np.array([65536, 256, 1])
    flat = cells.reshape(len(scenes), -1)
    different = (flat[:, None] != flat[None]).sum(-1)
    np.fill_diagonal(different, 64)
    assert different.min() >= 4


def test_a_image_is_its_cells_in_flat_blocks_of_eight_pixels() -> None:
    scene = Scene("green", "heart", "bottom right", "white")
    pixels = np.asarray(draw(scene))
    blocks = pixels.reshape(8, 8, 8, 8, 3)
    assert (blocks == draw_cells(scene)[:, None, :, None]).all()


def test_split_is_seeded_disjoint_and_complete() -> None:
    train, heldout = split_scenes(seed=3, heldout_fraction=0.1)
    assert len(heldout) == 52
    assert sorted(train + heldout) == sorted(all_scenes())
    assert split_scenes(seed=3, heldout_fraction=0.1) == (train, heldout)
    assert split_scenes(seed=4, heldout_fraction=0.1)[1] != heldout


def test_every_word_of_a_heldout_caption_is_seen_in_training() -> None:
    train, heldout = split_scenes(seed=0, heldout_fraction=0.1)
    seen = {word for scene in train for word in scene.caption.split()}
    assert {word for scene in heldout for word in scene.caption.split()} <= seen
