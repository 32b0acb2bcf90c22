"""What a tiny model's images show, and how close they are to their captions' drawings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data.shapes import (
    BACKGROUNDS,
    CELL_PIXELS,
    COLORS,
    GRID,
    POSITIONS,
    SPRITES,
    Scene,
    draw,
    draw_cells,
    sprite_mask,
    sprite_origin,
)
from grpo_core.rewards.similarity.measures import (
    coefficient_of_determination,
    peak_signal_to_noise_ratio,
    structural_similarity,
)
from grpo_core.rewards.tensors import to_tensor


@dataclass(frozen=True)
class ImageQuality:
    """The quality of a tiny model's images, as means over images.

    Attributes:
        images: number of images measured.
        color, background: share of images that agree with the caption, found by :func:`read_scene`.
        shape, position: the same for shape and position.
        r2: share of the variance of the caption's drawing that the image explains, at least 0.
        ssim: to the caption's drawing, raw in [-1, 1].
        psnr: to the caption's drawing, dB.
        ssim_group_std: Bessel-corrected standard deviation of SSIM among images of one caption: what a reward can
            distinguish.
    """

    images: int
    color: float
    shape: float
    position: float
    background: float
    r2: float
    ssim: float
    psnr: float
    ssim_group_std: float


def measure_images(images: Sequence[Image.Image], wanted: Sequence[Scene], *, group_size: int) -> ImageQuality:
    """Measure images that were made from the captions of these scenes; those of one caption are side by side.

    Args:
        group_size: images of one caption, at least 2.
    """
    found = [read_scene(image) for image in images]
    pixels, targets = _batch(images), _batch([draw(scene) for scene in wanted])
    ssim = structural_similarity(pixels, targets)
    return ImageQuality(
        images=len(images),
        color=_share([scene.color for scene in found], [scene.color for scene in wanted]),
        shape=_share([scene.shape for scene in found], [scene.shape for scene in wanted]),
        position=_share([scene.position for scene in found], [scene.position for scene in wanted]),
        background=_share([scene.background for scene in found], [scene.background for scene in wanted]),
        r2=coefficient_of_determination(pixels, targets).clamp(0, 1).mean().item(),
        ssim=ssim.mean().item(),
        psnr=peak_signal_to_noise_ratio(pixels, targets).mean().item(),
        ssim_group_std=ssim.view(-1, group_size).std(1).mean().item(),
    )


def read_scene(image: Image.Image) -> Scene:
    """Recognise the scene that an image shows.

    Each pixel votes for the nearest of all colours: the sprite colour and the background with most votes win.
    The shape is the sprite that, in these two colours and anywhere on the canvas, has the smallest mean squared
    difference to the image; the position is the nearest to this sprite's cell, along both axes.
    """
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    names = [*COLORS, *BACKGROUNDS]
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.float32)
    nearest = np.square(pixels[:, :, None] - palette).sum(-1).argmin(-1)
    votes = np.bincount(nearest.ravel(), minlength=len(names))
    color = names[int(votes[: len(COLORS)].argmax())]
    background = names[len(COLORS) + int(votes[len(COLORS) :].argmax())]
    shape, origin = _nearest_sprite(pixels, color, background)
    position = min(POSITIONS, key=lambda name: _cells_apart(sprite_origin(shape, name), origin))
    return Scene(color, shape, position, background)


def _nearest_sprite(pixels: NDArray[np.float32], color: str, background: str) -> tuple[str, tuple[int, int]]:
    # Compared with flat cells, the mean of a cell's pixels gives the same ranking as the pixels.
    cells = pixels.reshape(GRID, CELL_PIXELS, GRID, CELL_PIXELS, 3).mean(axis=(1, 3))
    differences: dict[tuple[str, tuple[int, int]], float] = {}
    for shape in SPRITES:
        scene = Scene(color, shape, "center", background)
        height, width = sprite_mask(shape).shape
        for origin in itertools.product(range(GRID - height + 1), range(GRID - width + 1)):
            differences[shape, origin] = float(np.square(cells - draw_cells(scene, origin)).sum())
    return min(differences, key=lambda placed: differences[placed])


def _cells_apart(first: tuple[int, int], second: tuple[int, int]) -> int:
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def _batch(images: Sequence[Image.Image]) -> Tensor:
    return torch.cat([to_tensor(image) for image in images])


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)
