"""How images are drawn: the sampling settings, and the token grids of an image size.

The model writes a small preview grid first, then the large grid that the decoder draws from.
"""

import math
from dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class GlmImageSettings:
    """How images are drawn.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, likewise.
        temperature: of the token distribution.
        top_k: as in grpo_core.sampling.Truncation, likewise the next two; 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
        decode_batch_size: images decoded at once, at most; siblings only.
    """

    height: int
    width: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_inference_steps: int = 50
    guidance_scale: float = 1.5
    decode_batch_size: int = 16

    @property
    def truncation(self) -> Truncation:
        """Which of the image codes can be drawn.

        Raises:
            InputError: a value outside its range.
        """
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True)
class Grid:
    """A grid of tokens, written row by row."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Number of cells."""
        return self.rows * self.columns


@dataclass(frozen=True)
class TokenGrids:
    """The grids of one image, in the order they are sampled: preview, then large."""

    preview: Grid
    large: Grid

    @property
    def tokens(self) -> int:
        """Sampled tokens an image; the end slot that follows is not one of them."""
        return self.preview.tokens + self.large.tokens


def preview_grid(large: Grid, unit: int) -> Grid:
    """About (unit / 2)^2 cells with the large grid's aspect; at unit 32 this is GlmImageProcessor's 16 x 16."""
    ratio = large.rows / large.columns
    return Grid(int(math.sqrt(ratio) * (unit // 2)), int(math.sqrt(1 / ratio) * (unit // 2)))


def token_grids(height: int, width: int, unit: int) -> TokenGrids:
    """The grids for an image size.

    Args:
        height: pixels.
        width: pixels.
        unit: pixels along one side of a large token.

    Raises:
        InputError: a side is not a positive multiple of the unit, or so long and thin that the preview vanishes.
    """
    for side, value in (("height", height), ("width", width)):
        if value <= 0 or value % unit:
            nearest = max(unit, round(value / unit) * unit)
            raise InputError(
                f"rollout.{side}", value, f"This model draws in units of {unit} pixels; the nearest is {nearest}."
            )
    large = Grid(height // unit, width // unit)
    preview = preview_grid(large, unit)
    if not preview.tokens:
        raise InputError("rollout.height and width", f"{height}x{width}", "Choose a less extreme aspect ratio.")
    return TokenGrids(preview=preview, large=large)
