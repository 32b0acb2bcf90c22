"""Image preparation: RGB as a person sees it, the size of another image, fp32 tensors in [0, 1]."""

import math
import struct

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image, ImageOps
from torch import Tensor

from grpo_core.errors import InputError

MAX_ASPECT_PERCENT = 2
"""By how many percent width / height may differ for a target to be squeezed to its sample's image."""

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def to_rgb(image: Image.Image, place: str) -> Image.Image:
    """The image in 8-bit RGB, upright as its EXIF orientation says, transparency laid over white.

    Args:
        image: bilevel, greyscale, palette, RGB, CMYK or YCbCr in 8 bits, or greyscale in 16 (divided by 257).
        place: where the image stands, for the message.

    Raises:
        InputError: another mode (of 32-bit integers or floats the range is not known); an empty image; a file that
            breaks off, or whose EXIF block is damaged.
    """
    if 0 in image.size:
        raise InputError(place, shown_size(image), "Give an image of at least 1x1 pixel.")
    try:
        # An image from a file is decoded here at the latest.
        image.load()
        upright = ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        hint = f"It cannot be decoded ({error}). Save it anew as 8-bit RGB (PNG or JPEG)."
        raise InputError(place, f"image of {shown_size(image)}", hint) from error
    if upright.mode in _SIXTEEN_BIT_MODES:
        # Pillow's own conversion clips at 255 instead of scaling, which turns most of the image white.
        levels = np.asarray(upright).astype(np.float64) / 257.0
        return Image.fromarray(levels.round().astype(np.uint8)).convert("RGB")
    if upright.mode not in _EIGHT_BIT_MODES:
        raise InputError(place, f"image of mode {upright.mode}", "Save it as 8-bit RGB (PNG or JPEG).")
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
    """Refuse a target that would be distorted at the size of an image; both are (width, height).

    Raises:
        InputError: the aspect ratios differ by more than MAX_ASPECT_PERCENT.
    """
    # Cross products, so that exactly the limit is decided without rounding.
    smaller, larger = sorted((target[0] * size[1], target[1] * size[0]))
    if 100 * (larger - smaller) > MAX_ASPECT_PERCENT * smaller:
        hint = (
            f"Crop it to the aspect ratio of the generated image, {size[0]}x{size[1]} pixels: a difference of more "
            f"than {MAX_ASPECT_PERCENT} % would distort it."
        )
        raise InputError(place, f"target of {target[0]}x{target[1]} pixels", hint)


def to_tensor(image: Image.Image) -> Float32[Tensor, "1 3 height width"]:
    """An 8-bit RGB image as fp32 in [0, 1], exactly level / 255.

    Raises:
        ValueError: another mode than RGB; :func:`to_rgb` converts.
    """
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, got mode {image.mode}")
    levels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return levels.permute(2, 0, 1).unsqueeze(0).contiguous().float() / 255.0


def check_pair(images: Tensor, targets: Tensor) -> None:
    """Refuse tensors that a likeness measure would score without complaint, and wrongly.

    uint8 levels look nearly alike to LPIPS, one channel and a single target broadcast, half precision gives NaN.

    Raises:
        ValueError: not fp32 of shape [N, 3, H, W], two shapes, or levels outside [0, 1].
    """
    for tensor in (images, targets):
        if tensor.dtype != torch.float32 or tensor.ndim != 4 or tensor.shape[1] != 3:
            raise ValueError(f"expected fp32 [N, 3, H, W], got {tensor.dtype} {list(tensor.shape)}")
        # Negated, so that NaN is refused with the rest.
        if not bool(((tensor >= 0) & (tensor <= 1)).all()):
            raise ValueError(f"expected levels in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
    if images.shape != targets.shape:
        raise ValueError(f"expected one shape, got {list(images.shape)} and {list(targets.shape)}")


def fits_reward(image: Image.Image, min_side: int, max_aspect: float) -> bool:
    """Whether a reward with these bounds can score an image of this size."""
    return min(image.size) >= min_side and max(image.size) <= max_aspect * min(image.size)


def shown_bounds(min_side: int, max_aspect: float) -> str:
    """A reward's bounds for a message."""
    side = f"at least {min_side} pixels a side"
    return side if math.isinf(max_aspect) else f"{side} and a long side of at most {max_aspect:g} times the short one"


def shown_size(image: Image.Image) -> str:
    """Width and height for a message: ``64x48``."""
    return f"{image.width}x{image.height}"
