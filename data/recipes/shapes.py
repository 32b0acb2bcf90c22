"""Synthetic images of one coloured shape on a plain background, also imperfect ones, captions and tokens.

An image is a grid of 8 x 8 cells with one flat colour each; a cell is 8 x 8 pixels, the size of one large image
token of the tiny GLM-Image. Its tokens are codes of one flat colour each: the colours, the backgrounds, and the blends
of a preview cell of which a sprite covers a quarter, a half or three quarters.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

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

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """Each field's name and value."""
        return (
            ("color", self.color),
            ("shape", self.shape),
            ("position", self.position),
            ("background", self.background),
        )

    @property
    def file_name(self) -> str:
        """Name of the file with its image."""
        return "-".join(value for _, value in self.words).replace(" ", "-") + ".png"


def all_scenes() -> tuple[Scene, ...]:
    """Return all scenes, in a fixed order."""
    return tuple(Scene(*words) for words in itertools.product(COLORS, SPRITES, POSITIONS, BACKGROUNDS))


def split_scenes(seed: int, heldout_fraction: float) -> tuple[tuple[Scene, ...], tuple[Scene, ...]]:
    """Split all scenes, in their order, into those for supervised training and a held-out share."""
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
    """Draw a scene as cells, uint8 [8, 8, 3]; `origin` is the sprite's top left one, None that of the position."""
    mask = sprite_mask(scene.shape)
    row, column = sprite_origin(scene.shape, scene.position) if origin is None else origin
    cells = np.tile(np.array(BACKGROUNDS[scene.background], dtype=np.uint8), (GRID, GRID, 1))
    cells[row : row + mask.shape[0], column : column + mask.shape[1]][mask] = COLORS[scene.color]
    return cells


def draw(scene: Scene) -> Image.Image:
    """Draw the image, 64 x 64 RGB, that a scene's caption describes."""
    return Image.fromarray(draw_cells(scene).repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1))


PREVIEW_GRID = GRID // 2
_COVERAGES = (0.25, 0.5, 0.75)


def codebook() -> NDArray[np.float32]:
    """Return the colour of each code, float32 [codes, 3], RGB in 0..255."""
    colors = np.array(list(COLORS.values()), dtype=np.float32)
    backgrounds = np.array(list(BACKGROUNDS.values()), dtype=np.float32)
    blends = [
        coverage * color + (1 - coverage) * background
        for color in colors
        for background in backgrounds
        for coverage in _COVERAGES
    ]
    return np.concatenate([colors, backgrounds, np.stack(blends).astype(np.float32)])


CODEBOOK_SIZE = len(COLORS) + len(BACKGROUNDS) + len(COLORS) * len(BACKGROUNDS) * len(_COVERAGES)


def _nearest_code(cells: NDArray[np.floating]) -> NDArray[np.int64]:
    distance = ((cells[..., None, :] - codebook()) ** 2).sum(-1)
    nearest: NDArray[np.int64] = distance.argmin(-1).astype(np.int64)
    return nearest


def encode_cells(cells: NDArray[np.uint8]) -> Tensor:
    """Encode images, uint8 [images, 8, 8, 3], as tokens, int64 [images, 16 + 64]: preview grid, then large grid."""
    count = len(cells)
    large = cells.astype(np.float32)
    preview = large.reshape(count, PREVIEW_GRID, 2, PREVIEW_GRID, 2, 3).mean(axis=(2, 4))
    tokens = [_nearest_code(grid).reshape(count, -1) for grid in (preview, large)]
    return torch.from_numpy(np.concatenate(tokens, axis=1))


def decode_tokens(large_tokens: Tensor) -> Tensor:
    """Decode tokens of the large grid, int64 [images, 64], to cell colours in [-1, 1], float32 [images, 3, 8, 8]."""
    colors = torch.from_numpy(codebook()) / 127.5 - 1
    return colors[large_tokens].view(-1, GRID, GRID, 3).permute(0, 3, 1, 2).contiguous()


TRAIN_FILE = "shapes_train.jsonl"
HELDOUT_FILE = "shapes_heldout.jsonl"


def choose_scenes(scenes: Sequence[Scene], count: int, seed: int) -> tuple[Scene, ...]:
    """Choose scenes so that every colour, shape, position and background is about equally frequent."""
    return choose_evenly(scenes, count, seed, lambda scene: scene.words)


T = TypeVar("T")


def choose_evenly(
    items: Sequence[T], count: int, seed: int, words_of: Callable[[T], Sequence[tuple[str, str]]]
) -> tuple[T, ...]:
    """Choose items so that each of their words is about equally frequent, greedily after the seed has ordered them."""
    if count > len(items):
        raise ValueError(f"count is {count}, but there are only {len(items)} to choose from")
    left = [items[i] for i in np.random.default_rng(seed).permutation(len(items))]
    chosen: list[T] = []
    used: dict[tuple[str, str], int] = {}
    for _ in range(count):
        item = min(left, key=lambda candidate: sum(used.get(word, 0) for word in words_of(candidate)))
        left.remove(item)
        chosen.append(item)
        for word in words_of(item):
            used[word] = used.get(word, 0) + 1
    return tuple(chosen)


def write_prompt_file(scenes: Sequence[Scene], file: Path, targets: Path) -> None:
    """Write one JSON object per scene, and its image as PNG into the folder of targets."""
    file.parent.mkdir(parents=True, exist_ok=True)
    targets.mkdir(parents=True, exist_ok=True)
    lines = []
    for scene in scenes:
        draw(scene).save(targets / scene.file_name, optimize=True)
        lines.append(json.dumps({"prompt": scene.caption, "target": scene.file_name, **dict(scene.words)}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ShapesRecipe:
    """The captioned images that a model is trained on; they are imperfect on purpose, like a real corpus.

    Attributes:
        heldout_fraction: share of the captions that the supervised training never sees.
        slip_probability: of a sprite that is moved by -1, 0 or 1 cells along each axis, within the canvas.
        confusion_probability: of another shape than the caption's.
        speckle_probability: of a random colour, per cell.
    """

    seed: int = 0
    heldout_fraction: float = 0.1
    corpus_size: int = 8192
    slip_probability: float = 0.5
    confusion_probability: float = 0.0
    speckle_probability: float = 0.04


def draw_imperfect_corpus(scenes: Sequence[Scene], recipe: ShapesRecipe) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Draw images of random scenes: which scene, int64 [images], and their cells, uint8 [images, 8, 8, 3]."""
    rng = np.random.default_rng(recipe.seed)
    index = rng.integers(len(scenes), size=recipe.corpus_size)
    cells = np.stack([_draw_imperfect(scenes[i], recipe, rng) for i in index])
    add_speckles(cells, recipe.speckle_probability, rng)
    return index, cells


def add_speckles(cells: NDArray[np.uint8], probability: float, rng: np.random.Generator) -> None:
    """Give each cell of images, uint8 [images, 8, 8, 3], a random colour with this probability, in place."""
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.uint8)
    stray = rng.random(cells.shape[:3]) < probability
    cells[stray] = palette[rng.integers(len(palette), size=int(stray.sum()))]


def _draw_imperfect(scene: Scene, recipe: ShapesRecipe, rng: np.random.Generator) -> NDArray[np.uint8]:
    if rng.random() < recipe.confusion_probability:
        scene = replace(scene, shape=str(rng.choice([shape for shape in SPRITES if shape != scene.shape])))
    row, column = sprite_origin(scene.shape, scene.position)
    if rng.random() < recipe.slip_probability:
        height, width = sprite_mask(scene.shape).shape
        row = int(np.clip(row + rng.integers(-1, 2), 0, GRID - height))
        column = int(np.clip(column + rng.integers(-1, 2), 0, GRID - width))
    return draw_cells(scene, origin=(row, column))
