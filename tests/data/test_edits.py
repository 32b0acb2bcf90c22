"""Edits of synthetic images, and the tiny GLM-Image that makes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.recipes.edits import Edit, all_edits, choose_edits, draw_edit_corpus, split_edits, write_edit_file
from data.recipes.shapes import PREVIEW_GRID, Scene, all_scenes, draw, draw_cells, encode_cells
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.sources import SourceEncoder
from grpo_core.rollouts.images import SourceImage, encode_png
from tests.tiny_policies import EDIT_MODEL

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
