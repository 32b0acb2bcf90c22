"""The sampling settings of images, the token grids of an image size, and checks of files that load no weights.

From text the model writes a small preview grid first, then the large grid that the decoder reads. An edit of source
images has no preview.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.pipeline_files import Parts, find_model_file
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.rollouts.streams import ImageSize, Stream, nearest_multiple
from grpo_core.settings import ImageSettings, TokenSamplingSettings

AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER = "vision_language_encoder", "transformer", "vae", "text_encoder"
PARTS: Parts = MappingProxyType(
    {
        AUTOREGRESSIVE: ("transformers", "GlmImageForConditionalGeneration"),
        DECODER: ("diffusers", "GlmImageTransformer2DModel"),
        TEXT_ENCODER: ("transformers", "T5EncoderModel"),
        VAE: ("diffusers", "AutoencoderKL"),
    }
)
TRAINED: Mapping[Stream, str] = MappingProxyType({"tokens": AUTOREGRESSIVE, "denoising": DECODER})
"""The network that makes a stream's actions."""

PROMPT_TOKENS = 256
"""Assumed number of ids of the longest prompt of a batch, grid tags included."""


@dataclass(frozen=True, kw_only=True)
class GlmImageSettings(ImageSettings, TokenSamplingSettings, DenoisingSettings):
    """How images are sampled; the settings of noisy steps count where the decoder is trained."""

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

    @property
    def of_edit(self) -> "TokenGrids":
        """The grids of an image of this size that is made of source images: without a preview."""
        return TokenGrids(preview=Grid(0, 0), large=self.large)


def preview_grid(large: Grid, unit: int) -> Grid:
    """Return a grid of about (unit / 2)^2 cells with the large grid's aspect; at unit 32 it is 16 x 16."""
    ratio = large.rows / large.columns
    return Grid(int(math.sqrt(ratio) * (unit // 2)), int(math.sqrt(1 / ratio) * (unit // 2)))


def token_grids(size: ImageSize, unit: int) -> TokenGrids:
    """Return the grids of an image size, `unit` pixels along a large token's side; InputError names the nearest."""
    nearest = nearest_size(size, unit)
    if size != nearest:
        hint = f"This model generates images in units of {unit} pixels; the nearest size is {nearest}."
        raise InputError("rollout.width and height", str(size), hint)
    large = Grid(size.height // unit, size.width // unit)
    return TokenGrids(preview=preview_grid(large, unit), large=large)


def nearest_size(size: ImageSize, unit: int) -> ImageSize:
    """Return the nearest size that can be generated, which is the size itself if it can.

    The long side is at most (unit / 2)^2 times the short one, or else the preview would have no cell.
    """
    sides = nearest_multiple(size, unit)
    longest = min(sides) * (unit // 2) ** 2
    return ImageSize(*(min(side, longest) for side in sides))


MAX_SOURCE_ASPECT = 4
"""Largest long side of a source image in short sides; the model's image processor refuses more."""


@dataclass(frozen=True)
class SourceLimits:
    """The sizes of source images that token model and decoder read alike; each resizes others by rules of its own.

    `smallest` bounds the short side and `largest` the long one, in pixels; sides are multiples of the unit.
    """

    smallest: int
    largest: int
    unit: int

    @classmethod
    def of(cls, image_processor: Any) -> "SourceLimits":
        """Return the limits of the model's image processor, which halves an image before it cuts patches."""
        size = image_processor.size
        return cls(
            # The two are numbers of pixels, whatever their names say.
            smallest=round(math.sqrt(size["shortest_edge"])),
            largest=round(math.sqrt(size["longest_edge"])),
            unit=2 * image_processor.patch_size * image_processor.merge_size,
        )

    def nearest(self, size: ImageSize) -> ImageSize:
        """Return the size to which a source image is resized; InputError over MAX_SOURCE_ASPECT short sides."""
        if max(size) > MAX_SOURCE_ASPECT * min(size):
            hint = f"The long side of a source image has at most {MAX_SOURCE_ASPECT} short sides; crop it."
            raise InputError("source image", f"{size} pixels", hint)
        scale = max(1.0, self.smallest / min(size))
        scale = min(scale, self.largest / max(size))
        sides = [max(self.unit, round(side * scale / self.unit) * self.unit) for side in size]
        # Rounding can lengthen the long side and shorten the other.
        return ImageSize(*(min(side, MAX_SOURCE_ASPECT * min(sides)) for side in sides))


def refuse_coarse_codes(model: str, code_unit: int, unit: int) -> None:
    """Raise InputError for source images if a code covers other pixels of them than a large token has."""
    if code_unit != unit:
        hint = (
            f"It cannot edit images: its vision tower has a code for {code_unit} pixels of a source image, and its "
            f"tokens are {unit} pixels. Take a model that can, as data/models/tiny-glm-image-edit, or drop the images."
        )
        raise InputError("policy.model", model, hint)


def read_pixel_unit(model: str) -> int | None:
    """Read the pixel unit from the configuration files of a model, None if they are not here; InputError if damaged."""
    decoder, autoencoder = (find_model_file(model, f"{part}/config.json") for part in (DECODER, VAE))
    if decoder is None or autoencoder is None:
        return None
    try:
        patch = json.loads(decoder.read_text())["patch_size"]
        widths = json.loads(autoencoder.read_text())["block_out_channels"]
        return int(2 * patch * 2 ** (len(widths) - 1))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"Its transformer/config.json or vae/config.json is damaged ({error!r}); save the pipeline again."
        raise InputError("policy.model", model, hint) from error
