"""Prompt files pair each caption with its image; those that are shipped are as the recipe says."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
from data.prompt_files import HELDOUT_FILE, TRAIN_FILE, choose_scenes, write_prompt_file
from data.shapes import Scene, all_scenes, draw, split_scenes
from data.tiny_glm_image import TinyRecipe

SHIPPED = Path(data.__file__).parent


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_written_rows_name_the_image_of_their_scene(tmp_path: Path) -> None:
    scenes = [Scene("red", "heart", "top left", "gray"), Scene("orange", "cross", "center", "black")]
    write_prompt_file(scenes, tmp_path / "prompts" / "some.jsonl", tmp_path / "targets")
    rows = read(tmp_path / "prompts" / "some.jsonl")
    assert rows[1] == {
        "prompt": "an orange cross in the center on a black background",
        "target": "orange-cross-center-black.png",
        "color": "orange",
        "shape": "cross",
        "position": "center",
        "background": "black",
    }
    for row, scene in zip(rows, scenes, strict=True):
        with Image.open(tmp_path / "targets" / row["target"]) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(draw(scene)))


def test_choice_is_balanced_seeded_and_without_repetition() -> None:
    chosen = choose_scenes(all_scenes(), 24, seed=5)
    assert len(set(chosen)) == 24
    assert chosen == choose_scenes(all_scenes(), 24, seed=5)
    assert chosen != choose_scenes(all_scenes(), 24, seed=6)
    for field in ("color", "shape", "position", "background"):
        counts = Counter(getattr(scene, field) for scene in chosen).values()
        assert max(counts) - min(counts) <= 2


def test_more_scenes_than_there_are() -> None:
    with pytest.raises(ValueError, match="3 scenes were asked for, there are 2"):
        choose_scenes(all_scenes()[:2], 3, seed=0)


def test_shipped_files_hold_the_recipes_captions_and_images() -> None:
    recipe = TinyRecipe()
    train, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    for name, scenes, count in (
        (TRAIN_FILE, train, recipe.train_prompts),
        (HELDOUT_FILE, heldout, recipe.heldout_prompts),
    ):
        rows = read(SHIPPED / "prompts" / name)
        expected = choose_scenes(scenes, count, recipe.seed)
        assert [row["prompt"] for row in rows] == [scene.caption for scene in expected]
        for row, scene in zip(rows, expected, strict=True):
            with Image.open(SHIPPED / "targets" / row["target"]) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(draw(scene)))
