"""Captioned drawings with mistakes on purpose, like a real corpus, for the supervised training of tiny models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from data.shapes import BACKGROUNDS, COLORS, GRID, SPRITES, Scene, draw_cells, sprite_mask, sprite_origin


@dataclass(frozen=True)
class Mistakes:
    """How often a drawing does not show what its caption says; a policy can unlearn that with rewards.

    Attributes:
        slip_probability: probability that a sprite is moved by -1, 0 or 1 cells along each axis, within the canvas.
        confusion_probability: probability that another shape than the caption's is drawn.
        speckle_probability: probability per cell of a random colour.
    """

    slip_probability: float
    confusion_probability: float
    speckle_probability: float


def draw_imperfect_corpus(
    scenes: Sequence[Scene], count: int, mistakes: Mistakes, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Draw `count` images of random scenes.

    Returns:
        int64 [count], which of the scenes the caption describes; uint8 [count, 8, 8, 3], one colour per cell.
    """
    rng = np.random.default_rng(seed)
    index = rng.integers(len(scenes), size=count)
    cells = np.stack([_draw_imperfect(scenes[i], mistakes, rng) for i in index])
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.uint8)
    stray = rng.random(cells.shape[:3]) < mistakes.speckle_probability
    cells[stray] = palette[rng.integers(len(palette), size=int(stray.sum()))]
    return index, cells


def _draw_imperfect(scene: Scene, mistakes: Mistakes, rng: np.random.Generator) -> NDArray[np.uint8]:
    if rng.random() < mistakes.confusion_probability:
        scene = replace(scene, shape=str(rng.choice([shape for shape in SPRITES if shape != scene.shape])))
    row, column = sprite_origin(scene.shape, scene.position)
    if rng.random() < mistakes.slip_probability:
        height, width = sprite_mask(scene.shape).shape
        row = int(np.clip(row + rng.integers(-1, 2), 0, GRID - height))
        column = int(np.clip(column + rng.integers(-1, 2), 0, GRID - width))
    return draw_cells(scene, origin=(row, column))
