"""The size of an image, and how large one may be; torch is not imported."""

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
