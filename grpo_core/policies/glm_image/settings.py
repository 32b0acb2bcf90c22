"""The sampling settings of images, the token grids of an image size, and checks of files that load no weights.

The model writes a small preview grid first, then the large grid that the decoder reads.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.sampling import TokenSamplingSettings


@dataclass(frozen=True)
class GlmImageSettings(TokenSamplingSettings):
    """How images are sampled.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, a multiple of the model's unit.
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
        decode_batch_size: maximum number of images decoded at once; siblings only.
    """

    height: PositiveInt
    width: PositiveInt
    num_inference_steps: PositiveInt = 50
    guidance_scale: NonNegativeFloat = 1.5
    decode_batch_size: PositiveInt = 16


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


def refuse_missing_folder(model: str) -> None:
    """Raise InputError for a path that is not a pipeline's folder; hub names pass."""
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise InputError("policy.model", model, "The folder has no model_index.json; give a saved pipeline's.")
    elif looks_local or path.parent.is_dir():
        raise InputError("policy.model", model, "There is no such folder; give a saved pipeline's, or a hub name.")


def read_pixel_unit(model: str) -> int | None:
    """Read the pixel unit of a saved pipeline from its configuration files; None if they are not on this machine.

    Args:
        model: a folder, or a hub name, whose files are searched in the local cache only.

    Raises:
        InputError: a configuration file lacks it.
    """
    decoder, autoencoder = _config_file(model, "transformer"), _config_file(model, "vae")
    if decoder is None or autoencoder is None:
        return None
    try:
        patch = json.loads(decoder.read_text())["patch_size"]
        widths = json.loads(autoencoder.read_text())["block_out_channels"]
        return int(2 * patch * 2 ** (len(widths) - 1))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"Its transformer/config.json or vae/config.json is damaged ({error!r}); save the pipeline again."
        raise InputError("policy.model", model, hint) from error


def _config_file(model: str, part: str) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        file = folder / part / "config.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, f"{part}/config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
