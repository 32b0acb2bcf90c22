"""The imperfect images of the tiny GLM-Image's supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.codebook import encode_cells
from data.shapes import BACKGROUNDS, COLORS, GRID, SPRITES, Scene, draw_cells, sprite_mask, sprite_origin
from data.tiny_glm_image.recipe import TinyRecipe


@dataclass(frozen=True)
class Corpus:
    """Captioned images as tokens.

    Attributes:
        scene_index: int64 [images], which of the given scenes the caption describes.
        tokens: int64 [images, 16 + 64], preview then large grid.
    """

    scene_index: Tensor
    tokens: Tensor


def draw_corpus(scenes: Sequence[Scene], recipe: TinyRecipe) -> Corpus:
    """Draw `recipe.corpus_size` images of random scenes, with slips, confusions and speckles at its rates."""
    rng = np.random.default_rng(recipe.seed)
    index = rng.integers(len(scenes), size=recipe.corpus_size)
    cells = np.stack([_draw_imperfect(scenes[i], recipe, rng) for i in index])
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.uint8)
    stray = rng.random(cells.shape[:3]) < recipe.speckle_probability
    cells[stray] = palette[rng.integers(len(palette), size=int(stray.sum()))]
    return Corpus(torch.from_numpy(index), encode_cells(cells))


def _draw_imperfect(scene: Scene, recipe: TinyRecipe, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < recipe.confusion_probability:
        scene = replace(scene, shape=str(rng.choice([shape for shape in SPRITES if shape != scene.shape])))
    row, column = sprite_origin(scene.shape, scene.position)
    if rng.random() < recipe.slip_probability:
        height, width = sprite_mask(scene.shape).shape
        row = int(np.clip(row + rng.integers(-1, 2), 0, GRID - height))
        column = int(np.clip(column + rng.integers(-1, 2), 0, GRID - width))
    return draw_cells(scene, origin=(row, column))
