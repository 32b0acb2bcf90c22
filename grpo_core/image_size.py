"""The size of an image, and how large one may be; torch is not imported."""

import math
from typing import NamedTuple

MAX_PIXELS = 8192 * 8192
"""Largest width times height of an image from anywhere; a small file can unpack to more than fits in memory."""


class ImageSize(NamedTuple):
    """Width and height of an image in pixels, in the order of PIL's `Image.size`; written 512x768."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def nearest_multiple(size: ImageSize, unit: int) -> ImageSize:
    """Return the nearest size of at most MAX_PIXELS whose sides are multiples of `unit` pixels."""
    sides = [max(unit, round(side / unit) * unit) for side in size]
    if math.prod(sides) > MAX_PIXELS:
        shrink = math.sqrt(MAX_PIXELS / math.prod(sides))
        sides = [max(unit, math.floor(side * shrink / unit + 1e-9) * unit) for side in sides]
    return ImageSize(*sides)
