"""Scenes, their captions and tokens, and the shipped prompt files that pair a caption with its image."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
from data.recipes.glm_image_parts import TinyRecipe
from data.recipes.shapes import (
    BACKGROUNDS,
    CODEBOOK_SIZE,
    COLORS,
    HELDOUT_FILE,
    TRAIN_FILE,
    Scene,
    all_scenes,
    choose_scenes,
    decode_tokens,
    draw,
    draw_cells,
    encode_cells,
    split_scenes,
)

SHIPPED = Path(data.__file__).parent


@pytest.mark.parametrize(
    ("scene", "caption", "rows"),
    [
        (
            Scene("red", "cross", "bottom left", "black"),
            "a red cross at the bottom left on a black background",
            ["........"] * 3 + ["..#.....", "..#.....", "#####...", "..#.....", "..#....."],
        ),
        # A grid of eight cells has no middle: the sprite is one cell off.
        (
            Scene("orange", "triangle", "center", "gray"),
            "an orange triangle in the center on a gray background",
            ["........"] * 2 + ["...#....", "..###...", ".#####.."] + ["........"] * 3,
        ),
    ],
)
def test_caption_and_cells_by_hand(scene: Scene, caption: str, rows: list[str]) -> None:
    covered = np.array([[cell == "#" for cell in row] for row in rows])
    expected = np.where(covered[..., None], COLORS[scene.color], BACKGROUNDS[scene.background])
    assert scene.caption == caption
    assert np.array_equal(draw_cells(scene), expected)
    blocks = np.asarray(draw(scene)).reshape(8, 8, 8, 8, 3)
    assert (blocks == expected[:, None, :, None]).all()


def test_scenes_differ_and_survive_encoding_and_decoding() -> None:
    """Every caption is distinct, two images differ in at least four cells, and every code is used."""
    scenes = all_scenes()
    assert len({scene.caption for scene in scenes}) == len(scenes)
    cells = np.stack([draw_cells(scene) for scene in scenes])
    flat = (cells.astype(np.int64) @ np.array([65536, 256, 1])).reshape(len(scenes), -1)
    different = (flat[:, None] != flat[None]).sum(-1)
    np.fill_diagonal(different, 64)
    assert different.min() >= 4
    tokens = encode_cells(cells)
    assert tokens.unique().tolist() == list(range(CODEBOOK_SIZE))
    decoded = (decode_tokens(tokens[:, 16:]).permute(0, 2, 3, 1) + 1) * 127.5
    np.testing.assert_allclose(decoded.numpy(), cells, atol=1e-3)


def test_shipped_files_pair_the_recipes_captions_with_their_images() -> None:
    recipe = TinyRecipe()
    train, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    for name, scenes, count in (
        (TRAIN_FILE, train, recipe.train_prompts),
        (HELDOUT_FILE, heldout, recipe.heldout_prompts),
    ):
        rows = [json.loads(line) for line in (SHIPPED / "prompts" / name).read_text(encoding="utf-8").splitlines()]
        expected = choose_scenes(scenes, count, recipe.seed)
        for row, scene in zip(rows, expected, strict=True):
            assert row["prompt"] == scene.caption
            assert Scene(row["color"], row["shape"], row["position"], row["background"]) == scene
            with Image.open(SHIPPED / "targets" / row["target"]) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(draw(scene)))
