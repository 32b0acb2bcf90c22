"""Drawn scenes, their captions and tokens, their edits, and the boxes of shapes; the shipped files are the recipe's."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

import data
from data.recipes.edits import Edit, all_edits, choose_edits, draw_edit_corpus, split_edits, write_edit_file
from data.recipes.glm_image_parts import TinyRecipe
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
from data.recipes.shapes import (
    BACKGROUNDS,
    CODEBOOK_SIZE,
    COLORS,
    HELDOUT_FILE,
    PREVIEW_GRID,
    TRAIN_FILE,
    Scene,
    all_scenes,
    choose_scenes,
    decode_tokens,
    draw,
    draw_cells,
    encode_cells,
)
from data.recipes.shapes import split_scenes as split_captions
from data.recipes.vision import TinyVisionRecipe
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.sources import SourceEncoder
from grpo_core.rollouts.images import SourceImage, encode_png
from tests.tiny_policies import EDIT_MODEL

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
    train, heldout = split_captions(recipe.seed, recipe.heldout_fraction)
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


EDIT = Edit(Scene("red", "circle", "top left", "white"), "blue")


def test_an_edit_by_hand() -> None:
    assert EDIT.instruction == "make the circle blue"
    assert EDIT.target == Scene("blue", "circle", "top left", "white")
    before, after = np.asarray(draw(EDIT.source)), np.asarray(draw(EDIT.target))
    # The circle's 21 cells of 8 x 8 pixels.
    assert (before != after).any(-1).sum() == 21 * 64


def test_held_out_edits_are_pairs_of_colours_that_are_never_seen() -> None:
    seen, unseen = split_edits(0, 0.1)
    assert sorted([*seen, *unseen]) == sorted(all_edits())
    # 7 x 6 pairs, 5 shapes, 5 positions, 3 backgrounds.
    assert (len(seen) + len(unseen), len(unseen)) == (3150, 4 * 75)
    pairs = [{(edit.source.color, edit.color) for edit in part} for part in (seen, unseen)]
    assert not pairs[0] & pairs[1]


def test_wrong_targets_are_as_frequent_as_asked() -> None:
    corpus = draw_edit_corpus(all_edits(), 2000, 0, speckle_probability=0.1, unedited_probability=0.25)
    clean = np.stack([draw_cells(edit.target) for edit in corpus.edits])
    same = [draw_cells(edit.source) for edit in corpus.edits]
    assert (corpus.sources == np.stack(same)).all()
    off = (corpus.targets != clean).any(-1)
    shape = (corpus.sources != clean).any(-1)
    kept = ((corpus.targets == corpus.sources).all(-1) & shape).sum((1, 2)) > shape.sum((1, 2)) / 2
    assert kept.mean() == pytest.approx(0.25, abs=0.03)
    edited = ~kept
    # One in ten random colours is the right one.
    assert off[edited].mean() == pytest.approx(0.09, abs=0.01)


def test_a_prompt_file_names_both_images(tmp_path: Path) -> None:
    chosen = choose_edits(all_edits(), 5, 0)
    write_edit_file(chosen, tmp_path / "prompts" / "edits.jsonl", tmp_path / "targets")
    lines = [json.loads(line) for line in (tmp_path / "prompts" / "edits.jsonl").read_text().splitlines()]
    for line, edit in zip(lines, chosen, strict=True):
        assert line["prompt"] == edit.instruction
        for found, scene in (
            (tmp_path / "prompts" / line["image"], edit.source),
            (tmp_path / "targets" / line["target"], edit.target),
        ):
            assert Image.open(found).tobytes() == draw(scene).tobytes()


def test_the_tower_reads_a_source_as_the_codes_that_draw_it() -> None:
    """Every scene: its codes are those that the token model answers with."""
    pipeline = load_pipeline(str(EDIT_MODEL), dtype=torch.float32, device=torch.device("cpu"))
    encoder = SourceEncoder(pipeline)
    for scene in all_scenes()[::7]:
        found = encoder.codes(SourceImage.of(encode_png(draw(scene))))
        expected = encode_cells(draw_cells(scene)[None])[0, PREVIEW_GRID**2 :]
        assert torch.equal(found.flatten(), expected)


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
