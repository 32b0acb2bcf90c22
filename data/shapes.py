"""Synthetic images of one coloured shape on a plain background, and their captions.

An image is a grid of 8 x 8 cells with one flat colour each; a cell is 8 x 8 pixels, the size of one large image
token of the tiny GLM-Image. A caption names colour, shape, position and background, so it determines its image.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GRID = 8
CELL_PIXELS = 8
IMAGE_PIXELS = GRID * CELL_PIXELS

Colour = tuple[int, int, int]

COLORS: Mapping[str, Colour] = {
    "red": (214, 39, 40),
    "orange": (255, 150, 30),
    "yellow": (245, 225, 60),
    "green": (44, 150, 60),
    "blue": (45, 90, 220),
    "purple": (130, 50, 170),
    "pink": (250, 140, 200),
}
BACKGROUNDS: Mapping[str, Colour] = {"white": (245, 245, 245), "gray": (128, 128, 128), "black": (20, 20, 20)}

# Any two of these differ in at least four cells at any position, so that an image with one wrong cell is still
# nearest to its shape.
SPRITES: Mapping[str, Sequence[str]] = {
    "circle": (".###.", "#####", "#####", "#####", ".###."),
    "square": ("####", "####", "####", "####"),
    "triangle": ("..#..", ".###.", "#####"),
    "cross": ("..#..", "..#..", "#####", "..#..", "..#.."),
    "heart": (".#.#.", "#####", "#####", ".###.", "..#.."),
}

# Where the sprite is on each axis: 0 the near edge, 1 the middle, 2 the far edge.
POSITIONS: Mapping[str, tuple[int, int]] = {
    "top left": (0, 0),
    "top right": (0, 2),
    "center": (1, 1),
    "bottom left": (2, 0),
    "bottom right": (2, 2),
}


@dataclass(frozen=True, order=True)
class Scene:
    """The description of one image; every field is a key of the table of the same name in this module."""

    color: str
    shape: str
    position: str
    background: str

    @property
    def caption(self) -> str:
        """The sentence that describes the image, for example "a red circle at the top left on a white background"."""
        article = "an" if self.color[0] in "aeiou" else "a"
        place = "in the center" if self.position == "center" else f"at the {self.position}"
        return f"{article} {self.color} {self.shape} {place} on a {self.background} background"


def all_scenes() -> tuple[Scene, ...]:
    """Return all scenes, in a fixed order."""
    return tuple(Scene(*words) for words in itertools.product(COLORS, SPRITES, POSITIONS, BACKGROUNDS))


def split_scenes(seed: int, heldout_fraction: float) -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """Split all scenes into those for supervised training and held-out ones.

    Args:
        seed: the same seed gives the same split.
        heldout_fraction: share of the combinations that is held out, in (0, 1).

    Returns:
        Training scenes and held-out scenes, each in the order of :func:`all_scenes`.
    """
    scenes = all_scenes()
    count = round(len(scenes) * heldout_fraction)
    heldout = {scenes[i] for i in np.random.default_rng(seed).permutation(len(scenes))[:count]}
    return tuple(s for s in scenes if s not in heldout), tuple(s for s in scenes if s in heldout)


def sprite_mask(shape: str) -> NDArray[np.bool_]:
    """Return the cells that a shape covers, bool [height, width] in cells."""
    return np.array([[cell == "#" for cell in row] for row in SPRITES[shape]])


def sprite_origin(shape: str, position: str) -> tuple[int, int]:
    """Return the cell (row, column) of the sprite's top left corner."""
    height, width = sprite_mask(shape).shape
    row, column = POSITIONS[position]
    return (GRID - height) * row // 2, (GRID - width) * column // 2


def draw_cells(scene: Scene, origin: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Draw a scene as one colour per cell.

    Args:
        scene: what to draw.
        origin: cell of the sprite's top left corner; None takes that of the scene's position.

    Returns:
        uint8 [8, 8, 3], RGB in 0..255.
    """
    mask = sprite_mask(scene.shape)
    row, column = sprite_origin(scene.shape, scene.position) if origin is None else origin
    cells = np.tile(np.array(BACKGROUNDS[scene.background], dtype=np.uint8), (GRID, GRID, 1))
    cells[row : row + mask.shape[0], column : column + mask.shape[1]][mask] = COLORS[scene.color]
    return cells


def cells_to_image(cells: NDArray[np.uint8]) -> Image.Image:
    """Scale cell colours, uint8 [8, 8, 3], up to a 64 x 64 RGB image."""
    return Image.fromarray(cells.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1))


def draw(scene: Scene) -> Image.Image:
    """Draw the image, 64 x 64 RGB, that a scene's caption describes."""
    return cells_to_image(draw_cells(scene))
