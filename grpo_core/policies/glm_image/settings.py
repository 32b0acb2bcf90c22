"""The sampling settings of images, and the token grids of an image size.

The model writes a small preview grid first, then the large grid that the decoder reads.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class GlmImageSettings:
    """How images are sampled.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, a multiple of the model's unit.
        temperature: of the token distribution.
        top_k: only the k likeliest ids can be sampled; 0: off.
        top_p: only the likeliest ids that together have this probability can be sampled; 1: off.
        min_p: only ids at least this times as probable as the likeliest can be sampled; 0: off.
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
        decode_batch_size: maximum number of images decoded at once; siblings only.
    """

    height: PositiveInt
    width: PositiveInt
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    num_inference_steps: PositiveInt = 50
    guidance_scale: NonNegativeFloat = 1.5
    decode_batch_size: PositiveInt = 16

    @property
    def truncation(self) -> Truncation:
        """Which of the image codes can be sampled.

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
        """Number of sampled tokens per image, without the end slot that follows."""
        return self.preview.tokens + self.large.tokens


def preview_grid(large: Grid, unit: int) -> Grid:
    """Return a grid of about (unit / 2)^2 cells with the large grid's aspect; at unit 32 it is 16 x 16."""
    ratio = large.rows / large.columns
    return Grid(int(math.sqrt(ratio) * (unit // 2)), int(math.sqrt(1 / ratio) * (unit // 2)))


def token_grids(height: int, width: int, unit: int) -> TokenGrids:
    """Return the grids for an image size.

    Args:
        height: pixels.
        width: pixels.
        unit: pixels along one side of a large token.

    Raises:
        InputError: a side is not a positive multiple of the unit, or the aspect ratio leaves no preview.
    """
    for side, value in (("height", height), ("width", width)):
        if value <= 0 or value % unit:
            nearest = max(unit, round(value / unit) * unit)
            raise InputError(
                f"rollout.{side}", value, f"This model uses units of {unit} pixels; the nearest is {nearest}."
            )
    large = Grid(height // unit, width // unit)
    preview = preview_grid(large, unit)
    if not preview.tokens:
        raise InputError("rollout.height and width", f"{height}x{width}", "Choose a less extreme aspect ratio.")
    return TokenGrids(preview=preview, large=large)
