"""Edits of synthetic images: a source image, an instruction to give its shape another colour, and the target image."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.recipes.shapes import COLORS, Scene, add_speckles, all_scenes, choose_evenly, draw, draw_cells

TRAIN_FILE = "edits_train.jsonl"
HELDOUT_FILE = "edits_heldout.jsonl"


@dataclass(frozen=True, order=True)
class Edit:
    """What the source image shows, and the new colour of its shape."""

    source: Scene
    color: str

    @property
    def instruction(self) -> str:
        """The prompt, for example "make the circle blue"."""
        return f"make the {self.source.shape} {self.color}"

    @property
    def target(self) -> Scene:
        """What the edited image shows."""
        return replace(self.source, color=self.color)


def all_edits() -> tuple[Edit, ...]:
    """Return all edits, in a fixed order."""
    pairs = itertools.product(all_scenes(), COLORS)
    return tuple(Edit(scene, color) for scene, color in pairs if scene.color != color)


def split_edits(seed: int, heldout_fraction: float) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
    """Split all edits by their pairs of colours, before and after, into training and held-out ones."""
    pairs = list(itertools.permutations(COLORS, 2))
    order = np.random.default_rng(seed).permutation(len(pairs))
    heldout = {pairs[i] for i in order[: round(len(pairs) * heldout_fraction)]}
    edits = all_edits()
    left = {edit for edit in edits if (edit.source.color, edit.color) in heldout}
    return tuple(edit for edit in edits if edit not in left), tuple(edit for edit in edits if edit in left)


@dataclass(frozen=True)
class EditCorpus:
    """Edits, and of each the source and the imperfect target, uint8 [images, 8, 8, 3], one colour per cell."""

    edits: tuple[Edit, ...]
    sources: NDArray[np.uint8]
    targets: NDArray[np.uint8]


def draw_edit_corpus(
    edits: Sequence[Edit], count: int, seed: int, *, speckle_probability: float, unedited_probability: float
) -> EditCorpus:
    """Draw `count` random edits; targets have speckles per cell, and some keep the colour of the source."""
    rng = np.random.default_rng(seed)
    chosen = tuple(edits[i] for i in rng.integers(len(edits), size=count))
    shown = [edit.source if rng.random() < unedited_probability else edit.target for edit in chosen]
    targets = np.stack([draw_cells(scene) for scene in shown])
    add_speckles(targets, speckle_probability, rng)
    return EditCorpus(chosen, np.stack([draw_cells(edit.source) for edit in chosen]), targets)


def choose_edits(edits: Sequence[Edit], count: int, seed: int) -> tuple[Edit, ...]:
    """Choose edits so that every colour, shape, position and background is about equally frequent."""
    return choose_evenly(edits, count, seed, lambda edit: (*edit.source.words, ("new color", edit.color)))


SOURCES = "sources"
"""Folder of the source images, beside the prompt file."""


def write_edit_file(edits: Sequence[Edit], file: Path, targets: Path) -> None:
    """Write one JSON object per edit, and its two images as PNG.

    The columns are prompt, image (the source), target (in the folder of targets), shape, the new color, position and
    background.
    """
    sources = file.parent / SOURCES
    for folder in (sources, targets):
        folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for edit in edits:
        for scene, folder in ((edit.source, sources), (edit.target, targets)):
            draw(scene).save(folder / scene.file_name, optimize=True)
        image, target = f"{SOURCES}/{edit.source.file_name}", edit.target.file_name
        line = {"prompt": edit.instruction, "image": image, "target": target}
        lines.append(json.dumps({**line, **dict(edit.target.words)}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
