"""Drawn scenes: what is in the pixels is where the box says, and the files are those of the recipe."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import polars as pl
import pytest
from PIL import Image

import data
from data.recipes.grounding import (
    PROMPT_FILES,
    SIDE,
    GroundingScene,
    best_constant_box,
    draw_scenes,
    iou_of,
    split_scenes,
    write_medground_example,
    write_prompt_files,
)
from data.recipes.shapes import BACKGROUNDS, COLORS
from data.recipes.vision import TinyVisionRecipe

FOLDER = Path(data.__file__).parent
RECIPE = TinyVisionRecipe()


@pytest.mark.parametrize("shapes", [1, 2, 3])
def test_a_box_is_the_smallest_around_the_pixels_of_its_colour(shapes: int) -> None:
    for scene in draw_scenes(40, np.random.default_rng(0), shapes=shapes):
        pixels = np.asarray(scene.draw())
        assert len({placed.color for placed in scene.shapes}) == len(scene.shapes) == shapes
        for placed in scene.shapes:
            rows, columns = np.nonzero((pixels == COLORS[placed.color]).all(-1))
            found = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            if shapes == 1:
                assert found == placed.box
            # Another shape may cover a corner of it.
            assert iou_of(found, placed.box) > 0.6
            assert all(edge % 4 == 0 and 0 <= edge <= SIDE for edge in placed.box)
        drawn = (pixels != BACKGROUNDS["white"]).any(-1).sum()
        assert drawn == sum((pixels == COLORS[placed.color]).all(-1).sum() for placed in scene.shapes)


def test_the_question_and_the_answer_are_about_the_first_shape() -> None:
    (scene,) = draw_scenes(1, np.random.default_rng(3), shapes=2)
    first, last = scene.shapes
    assert scene.prompt == f"where is the {first.color} {first.shape}? <image>"
    assert [int(word) for word in scene.answer.split()] == list(first.box)
    other = scene.asked_about_the_last
    assert (other.box, other.shapes) == (last.box, (last, first))
    # The same image, whichever is drawn first, since they hardly overlap.
    assert np.mean(np.asarray(other.draw()) != np.asarray(scene.draw())) < 0.02


@pytest.mark.parametrize("shapes", [1, 2])
def test_heldout_scenes_are_in_no_training(shapes: int) -> None:
    train, heldout = split_scenes(0, train=2000, heldout=100, shapes=shapes)
    assert not set(train) & set(heldout)
    assert len(set(train)) == 2000
    fewer = split_scenes(0, train=400, heldout=100, shapes=shapes)
    assert fewer == (train[:400], heldout)


def test_the_best_constant_box_is_better_than_its_neighbours() -> None:
    scenes, _ = split_scenes(0, train=300, heldout=0)

    def mean(box: tuple[int, int, int, int]) -> float:
        return float(np.mean([iou_of(box, scene.box) for scene in scenes]))

    best = best_constant_box(scenes)
    for edge in range(4):
        for step in (-4, 4):
            moved = list(best)
            moved[edge] += step
            assert mean((moved[0], moved[1], moved[2], moved[3])) <= mean(best)


def test_the_shipped_prompt_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    write_prompt_files(tmp_path, RECIPE.seed, train=RECIPE.train_prompts, heldout=RECIPE.heldout_prompts)
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} == {name for names in PROMPT_FILES.values() for name in names}
    for file in files:
        ours, shipped = pl.read_parquet(file), pl.read_parquet(FOLDER / "prompts" / file.name)
        assert ours.select("prompt", "box").equals(shipped.select("prompt", "box"))
        # Another release of zlib may compress the same pixels to other bytes.
        for one, other in zip(ours["image"], shipped["image"], strict=True):
            assert one["path"] == other["path"]
            assert pixels_of(one["bytes"]) == pixels_of(other["bytes"])


def pixels_of(content: bytes) -> bytes:
    return Image.open(io.BytesIO(content)).convert("RGB").tobytes()


def test_datasets_shows_the_images_of_a_prompt_file(tmp_path: Path) -> None:
    file = FOLDER / "prompts" / PROMPT_FILES[2][1]
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path))
    _, scenes = split_scenes(RECIPE.seed, train=0, heldout=RECIPE.heldout_prompts, shapes=2)
    assert len(rows) == len(scenes)
    for row, scene in list(zip(rows, scenes, strict=True))[:5]:
        assert (row["prompt"], row["box"]) == (scene.prompt, list(scene.box))
        assert row["image"].convert("RGB").tobytes() == scene.draw().tobytes()


def test_the_example_of_medgrounds_data_is_that_of_the_recipe(tmp_path: Path) -> None:
    write_medground_example(tmp_path, RECIPE.seed, RECIPE.medground_prompts)
    shipped = FOLDER / "medground"
    names = {file.relative_to(shipped) for file in shipped.rglob("*") if file.is_file()}
    assert names == {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    rows = json.loads((shipped / "train.json").read_text(encoding="utf-8"))
    assert rows == json.loads((tmp_path / "train.json").read_text(encoding="utf-8"))
    for row in rows:
        assert row.keys() == {"image", "problem", "solution"}
        image = Image.open(shipped / row["image"]).convert("RGB")
        assert image.tobytes() == Image.open(tmp_path / row["image"]).convert("RGB").tobytes()
        left, top, right, bottom = row["solution"]
        color = row["problem"].removesuffix(".").split()[-2]
        assert COLORS[color] in {image.getpixel((x, y)) for x in (left, right - 1) for y in (top, bottom - 1)} | {
            image.getpixel(((left + right) // 2, (top + bottom) // 2))
        }


def test_as_many_different_scenes_as_are_asked_for() -> None:
    assert len(set(draw_scenes(50, np.random.default_rng(0)))) == 50
    known = draw_scenes(50, np.random.default_rng(0))
    assert not set(draw_scenes(50, np.random.default_rng(0), without=set(known))) & set(known)
    assert all(isinstance(scene, GroundingScene) for scene in known)
