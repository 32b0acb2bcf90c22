"""The corpus is as imperfect as the recipe says, and no more."""

from dataclasses import replace

import numpy as np
import torch

from data.codebook import PURE_CODES, encode_cells
from data.shapes import Scene, all_scenes, draw_cells
from data.tiny_glm_image.corpus import draw_corpus
from data.tiny_glm_image.recipe import TinyRecipe

CLEAN = TinyRecipe(corpus_size=1000, slip_probability=0.0, confusion_probability=0.0, speckle_probability=0.0)
SCENES = all_scenes()[::5]


def clean_tokens(scene_index: torch.Tensor, scenes: tuple[Scene, ...] = SCENES) -> torch.Tensor:
    return encode_cells(np.stack([draw_cells(scenes[int(i)]) for i in scene_index]))


def test_without_imperfections_every_image_is_its_captions() -> None:
    corpus = draw_corpus(SCENES, CLEAN)
    assert torch.equal(corpus.tokens, clean_tokens(corpus.scene_index))
    assert len(corpus.scene_index.unique()) == len(SCENES)


def test_same_seed_same_corpus() -> None:
    recipe = TinyRecipe(corpus_size=50)
    assert torch.equal(draw_corpus(SCENES, recipe).tokens, draw_corpus(SCENES, recipe).tokens)
    assert not torch.equal(draw_corpus(SCENES, recipe).tokens, draw_corpus(SCENES, replace(recipe, seed=1)).tokens)


def test_speckles_come_at_their_rate() -> None:
    corpus = draw_corpus(SCENES, replace(CLEAN, speckle_probability=0.05))
    changed = (corpus.tokens != clean_tokens(corpus.scene_index))[:, 16:].float().mean().item()
    # One in ten speckles has the colour that was there; 64,000 cells give a standard error of 0.0008.
    assert abs(changed - 0.05 * (1 - 1 / PURE_CODES)) < 0.004


def test_slips_move_whole_sprites_by_a_cell_inside_the_canvas() -> None:
    scene = Scene("red", "square", "center", "white")
    corpus = draw_corpus([scene], replace(CLEAN, slip_probability=1.0))
    red = (corpus.tokens[:, 16:] == 0).view(-1, 8, 8)
    assert (red.sum((1, 2)) == 16).all()
    origins = {tuple(image.nonzero().min(0).values.tolist()) for image in red}
    assert origins == {(row, column) for row in (1, 2, 3) for column in (1, 2, 3)}


def test_confusions_draw_another_shape_in_the_same_color() -> None:
    scene = Scene("red", "square", "center", "white")
    corpus = draw_corpus([scene], replace(CLEAN, confusion_probability=1.0))
    red = (corpus.tokens[:, 16:] == 0).view(-1, 8, 8)
    square = (clean_tokens(torch.tensor([0]), (scene,))[0, 16:] == 0).view(8, 8)
    assert not (red == square).all(2).all(1).any()
    # Triangle and cross have nine cells each, the heart sixteen, the circle twenty-one.
    assert red.sum((1, 2)).unique().tolist() == [9, 16, 21]
