"""The sampling settings of images, the token grids of an image size, and checks of files that load no weights.

The model writes a small preview grid first, then the large grid that the decoder reads.
"""

import json
import math
from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.pipeline_files import find_model_file
from grpo_core.settings import ImageSettings, TokenSamplingSettings
from grpo_core.streams import ImageSize, nearest_multiple


@dataclass(frozen=True, kw_only=True)
class GlmImageSettings(ImageSettings, TokenSamplingSettings, DenoisingSettings):
    """How images are sampled; the settings of noisy steps count where the decoder is trained.

    Attributes:
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
    """

    num_inference_steps: PositiveInt = 50
    guidance_scale: NonNegativeFloat = 1.5


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


def token_grids(size: ImageSize, unit: int) -> TokenGrids:
    """Return the grids of an image size.

    Args:
        unit: pixels along one side of a large token.

    Raises:
        InputError: a size that cannot be generated; names the nearest one.
    """
    nearest = nearest_size(size, unit)
    if size != nearest:
        hint = f"This model generates images in units of {unit} pixels; the nearest size is {nearest}."
        raise InputError("rollout.width and height", str(size), hint)
    large = Grid(size.height // unit, size.width // unit)
    return TokenGrids(preview=preview_grid(large, unit), large=large)


def nearest_size(size: ImageSize, unit: int) -> ImageSize:
    """Return the nearest size that can be generated, which is the size itself if it can.

    Sides are multiples of the unit, an image has at most MAX_PIXELS, as no more could be read for a reward, and the
    long side is at most (unit / 2)^2 times the short one, or else the preview would have no cell.
    """
    sides = nearest_multiple(size, unit)
    longest = min(sides) * (unit // 2) ** 2
    return ImageSize(*(min(side, longest) for side in sides))


def read_pixel_unit(model: str) -> int | None:
    """Read the pixel unit of a saved pipeline from its configuration files; None if they are not on this machine.

    Args:
        model: a folder, or a hub name, whose files are searched in the local cache only.

    Raises:
        InputError: a configuration file lacks it.
    """
    decoder, autoencoder = (find_model_file(model, f"{part}/config.json") for part in ("transformer", "vae"))
    if decoder is None or autoencoder is None:
        return None
    try:
        patch = json.loads(decoder.read_text())["patch_size"]
        widths = json.loads(autoencoder.read_text())["block_out_channels"]
        return int(2 * patch * 2 ** (len(widths) - 1))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"Its transformer/config.json or vae/config.json is damaged ({error!r}); save the pipeline again."
        raise InputError("policy.model", model, hint) from error
