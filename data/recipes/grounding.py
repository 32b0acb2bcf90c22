"""Drawn images and questions about where a shape is: "where is the red circle? <image>", answered "4 12 20 28".

An image is 56 x 56 pixels with one shape, or several of different colours; places and sizes are multiples of 4 pixels.
The answer is the box of the shape that was asked for: left, top, right and bottom in pixels. The question comes before
the image: a small model that reads the image first learns where the shapes are and not which of two is meant.
"""

import io
import itertools
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from data.recipes.shapes import BACKGROUNDS, COLORS
from grpo_core.rewards.text.boxes import Box, box_iou

SIDE, STEP = 56, 4
SIZES = (12, 16, 20, 24)
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class PlacedShape:
    """One shape: its colour, what it is, and its box in pixels."""

    color: str
    shape: str
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class GroundingScene:
    """The shapes of an image; the question is about the first."""

    shapes: tuple[PlacedShape, ...]

    @property
    def question(self) -> str:
        """What is asked, for example "where is the red circle?"."""
        return f"where is the {self.shapes[0].color} {self.shapes[0].shape}?"

    @property
    def prompt(self) -> str:
        """The question and the mark of the image after it."""
        return f"{self.question} <image>"

    @property
    def asked_about_the_last(self) -> "GroundingScene":
        """The same image, asked about its last shape."""
        return GroundingScene(self.shapes[::-1])

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the shape that the question is about, in pixels."""
        return self.shapes[0].box

    @property
    def answer(self) -> str:
        """The box in words, for example "4 12 20 28"."""
        return " ".join(map(str, self.box))

    def draw(self) -> Image.Image:
        """Draw the image, 56 x 56 RGB."""
        image = Image.new("RGB", (SIDE, SIDE), BACKGROUNDS["white"])
        pen = ImageDraw.Draw(image)
        for placed in self.shapes:
            left, top, right, bottom = placed.box
            # Pillow counts the last pixel in, a box does not.
            last, fill = (left, top, right - 1, bottom - 1), COLORS[placed.color]
            if placed.shape == "circle":
                pen.ellipse(last, fill=fill)
            elif placed.shape == "square":
                pen.rectangle(last, fill=fill)
            else:
                pen.polygon([(left, bottom - 1), (right - 1, bottom - 1), ((left + right) / 2, top)], fill=fill)
        return image


def draw_scenes(
    count: int, rng: np.random.Generator, *, shapes: int = 1, without: Container[GroundingScene] = frozenset()
) -> tuple[GroundingScene, ...]:
    """Draw distinct scenes with this many shapes that overlap little, none of them in `without`."""
    scenes: dict[GroundingScene, None] = {}
    while len(scenes) < count:
        scene = _draw_scene(rng, shapes)
        if scene not in without:
            scenes[scene] = None
    return tuple(scenes)


def _draw_scene(rng: np.random.Generator, shapes: int) -> GroundingScene:
    colors = rng.permutation(sorted(COLORS))[:shapes]
    while True:
        boxes = [_draw_box(rng) for _ in colors]
        # Two shapes may touch and not hide each other.
        if all(iou_of(*pair) < 0.05 for pair in itertools.combinations(boxes, 2)):
            break
    return GroundingScene(
        tuple(
            PlacedShape(str(color), SHAPES[rng.integers(len(SHAPES))], box)
            for color, box in zip(colors, boxes, strict=True)
        )
    )


def _draw_box(rng: np.random.Generator) -> tuple[int, int, int, int]:
    size = int(rng.choice(SIZES))
    left, top = (STEP * int(place) for place in rng.integers(0, (SIDE - size) // STEP + 1, size=2))
    return left, top, left + size, top + size


def iou_of(first: Box, second: Box) -> float:
    """Compute the intersection over union of two boxes."""
    return float(box_iou(np.array([first], dtype=np.float64), np.array([second], dtype=np.float64))[0, 0])


def best_constant_box(scenes: Sequence[GroundingScene]) -> tuple[int, int, int, int]:
    """Return the box on the grid with the highest mean IoU: what can be answered without looking at the image."""
    edges = range(0, SIDE + 1, STEP)
    boxes = [(a, b, c, d) for a, b, c, d in itertools.product(edges, repeat=4) if a < c and b < d]
    wanted = np.array([scene.box for scene in scenes], dtype=np.float64)
    return boxes[int(box_iou(np.array(boxes, dtype=np.float64), wanted).mean(axis=1).argmax())]


def split_scenes(seed: int, *, train: int, heldout: int, shapes: int = 1) -> tuple[tuple[GroundingScene, ...], ...]:
    """Return scenes for training and held-out scenes; the held-out ones do not depend on the number of others."""
    unseen = draw_scenes(heldout, np.random.default_rng([seed, shapes, 1]), shapes=shapes)
    seen = draw_scenes(train, np.random.default_rng([seed, shapes, 2]), shapes=shapes, without=frozenset(unseen))
    return seen, unseen


PROMPT_FILES = {1: ("grounding_train.parquet", "grounding_heldout.parquet")} | {
    2: ("grounding_two_train.parquet", "grounding_two_heldout.parquet")
}
"""Training and held-out prompts, by the number of shapes in an image."""

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_SCHEMA = pa.schema({"prompt": pa.string(), "image": _IMAGE, "box": pa.list_(pa.int32())})
# What the library `datasets` needs to show the column as images.
_FEATURES = {
    "prompt": {"dtype": "string", "_type": "Value"},
    "image": {"_type": "Image"},
    "box": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
}


def write_prompt_files(folder: Path, seed: int, *, train: int, heldout: int) -> None:
    """Write the prompt files of one shape in an image and of two, with so many rows each."""
    for shapes, names in PROMPT_FILES.items():
        for scenes, name in zip(split_scenes(seed, train=train, heldout=heldout, shapes=shapes), names, strict=True):
            write_scenes(scenes, folder / name)


def write_scenes(scenes: Sequence[GroundingScene], file: Path) -> None:
    """Write one row a scene, with the columns prompt, image (a PNG) and box, as `datasets` writes them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": scene.prompt, "image": {"bytes": png_of(scene), "path": f"{number:04d}.png"}, "box": scene.box}
        for number, scene in enumerate(scenes)
    ]
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA).replace_schema_metadata(metadata), file)


def png_of(scene: GroundingScene) -> bytes:
    """Encode the image of a scene."""
    buffer = io.BytesIO()
    scene.draw().save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


MEDGROUND_FILE = "train.json"
_ENLARGED = 8


def write_medground_example(folder: Path, seed: int, count: int) -> None:
    """Write data as MedGround-R1 reads it: an array of objects with image, problem and solution, and the images.

    The images, 448 x 448 pixels, show shapes and not X-rays; file names are relative to the folder.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, scene in enumerate(split_scenes(seed, train=count, heldout=0, shapes=2)[0]):
        name, asked = f"images/{number:02d}.png", scene.shapes[0]
        image = scene.draw().resize((_ENLARGED * SIDE, _ENLARGED * SIDE), Image.Resampling.NEAREST)
        image.save(folder / name, "PNG", optimize=True)
        problem = f"Please give the bounding box of the region that this phrase describes: {asked.color} {asked.shape}."
        rows.append({"image": name, "problem": problem, "solution": [_ENLARGED * edge for edge in asked.box]})
    lines = ",\n".join(json.dumps(row) for row in rows)
    (folder / MEDGROUND_FILE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
