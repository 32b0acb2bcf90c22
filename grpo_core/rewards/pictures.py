"""Picture preparation: RGB as a person sees it, the size of another picture, fp32 tensors in [0, 1]."""

import math
import struct

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image, ImageOps
from torch import Tensor

from grpo_core.errors import InputError

MAX_ASPECT_PERCENT = 2
"""By how many percent width / height may differ for a target to be squeezed to its sample's picture."""

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def to_rgb(picture: Image.Image, place: str) -> Image.Image:
    """The picture in 8-bit RGB, upright as its EXIF orientation says, transparency laid over white.

    Args:
        picture: bilevel, greyscale, palette, RGB, CMYK or YCbCr in 8 bits, or greyscale in 16 (divided by 257).
        place: where the picture stands, for the message.

    Raises:
        InputError: another mode (of 32-bit integers or floats the range is not known); an empty picture; a file that
            breaks off, or whose EXIF block is damaged.
    """
    if 0 in picture.size:
        raise InputError(place, shown_size(picture), "Give a picture of at least 1x1 pixel.")
    try:
        # A picture from a file is decoded here at the latest.
        picture.load()
        upright = ImageOps.exif_transpose(picture)
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        mend = f"It cannot be decoded ({error}). Save it anew as 8-bit RGB (PNG or JPEG)."
        raise InputError(place, f"picture of {shown_size(picture)}", mend) from error
    if upright.mode in _SIXTEEN_BIT_MODES:
        # Pillow's own conversion clips at 255 instead of scaling, which turns most of the picture white.
        levels = np.asarray(upright).astype(np.float64) / 257.0
        return Image.fromarray(levels.round().astype(np.uint8)).convert("RGB")
    if upright.mode not in _EIGHT_BIT_MODES:
        raise InputError(place, f"picture of mode {upright.mode}", "Save it as 8-bit RGB (PNG or JPEG).")
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def fit_to(target: Image.Image, size: tuple[int, int], place: str) -> Image.Image:
    """The RGB target at `size` (width, height), resampled with Pillow's antialiased bicubic filter.

    Pillow widens the filter when it shrinks, which most tensor libraries do not (Parmar et al., 2022, "On Aliased
    Resizing and Surprising Subtleties in GAN Evaluation", arXiv:2104.11222).

    Raises:
        InputError: the aspect ratios differ by more than MAX_ASPECT_PERCENT.
    """
    if target.size == size:
        return target
    require_aspect(target.size, size, place)
    return target.resize(size, Image.Resampling.BICUBIC)


def require_aspect(target: tuple[int, int], size: tuple[int, int], place: str) -> None:
    """Refuse a target that would be distorted at the size of a picture; both are (width, height).

    Raises:
        InputError: the aspect ratios differ by more than MAX_ASPECT_PERCENT.
    """
    # Cross products, so that exactly the limit is decided without rounding.
    smaller, larger = sorted((target[0] * size[1], target[1] * size[0]))
    if 100 * (larger - smaller) > MAX_ASPECT_PERCENT * smaller:
        mend = (
            f"Crop it to the aspect ratio of the generated picture, {size[0]}x{size[1]} pixels: a difference of more "
            f"than {MAX_ASPECT_PERCENT} % would distort it."
        )
        raise InputError(place, f"target of {target[0]}x{target[1]} pixels", mend)


def to_tensor(picture: Image.Image) -> Float32[Tensor, "1 3 height width"]:
    """An 8-bit RGB picture as fp32 in [0, 1], exactly level / 255.

    Raises:
        ValueError: another mode than RGB; :func:`to_rgb` converts.
    """
    if picture.mode != "RGB":
        raise ValueError(f"expected an RGB picture, got mode {picture.mode}")
    levels = torch.from_numpy(np.array(picture, dtype=np.uint8))
    return levels.permute(2, 0, 1).unsqueeze(0).contiguous().float() / 255.0


def check_pair(pictures: Tensor, targets: Tensor) -> None:
    """Refuse tensors that a likeness measure would score without complaint, and wrongly.

    uint8 levels look nearly alike to LPIPS, one channel and a single target broadcast, half precision gives NaN.

    Raises:
        ValueError: not fp32 of shape [N, 3, H, W], two shapes, or levels outside [0, 1].
    """
    for tensor in (pictures, targets):
        if tensor.dtype != torch.float32 or tensor.ndim != 4 or tensor.shape[1] != 3:
            raise ValueError(f"expected fp32 [N, 3, H, W], got {tensor.dtype} {list(tensor.shape)}")
        # Negated, so that NaN is refused with the rest.
        if not bool(((tensor >= 0) & (tensor <= 1)).all()):
            raise ValueError(f"expected levels in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
    if pictures.shape != targets.shape:
        raise ValueError(f"expected one shape, got {list(pictures.shape)} and {list(targets.shape)}")


def fits_reward(picture: Image.Image, min_side: int, max_aspect: float) -> bool:
    """Whether a reward with these bounds can score a picture of this size."""
    return min(picture.size) >= min_side and max(picture.size) <= max_aspect * min(picture.size)


def shown_bounds(min_side: int, max_aspect: float) -> str:
    """A reward's bounds for a message."""
    side = f"at least {min_side} pixels a side"
    return side if math.isinf(max_aspect) else f"{side} and a long side of at most {max_aspect:g} times the short one"


def shown_size(picture: Image.Image) -> str:
    """Width and height for a message: ``64x48``."""
    return f"{picture.width}x{picture.height}"
