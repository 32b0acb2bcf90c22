"""Images: read from files within bounds, brought to RGB and to the size of another image; torch is not imported."""

import hashlib
import io
import math
import struct
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageOps

from grpo_core.errors import InputError
from grpo_core.rollouts.messages import IMAGE_MARK
from grpo_core.rollouts.streams import MAX_PIXELS

MAX_ASPECT_PERCENT = 2
"""By how many percent width / height may differ for a target to be squeezed to its sample's image."""

WINDOW = 11
"""Side of SSIM's Gaussian window in pixels; also the smallest image, because only complete windows count."""

_READABLE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def open_image(content: bytes, place: str, formats: tuple[str, ...] = _READABLE_FORMATS) -> Image.Image:
    """Read the header of an image of these formats and check its size; no pixel is decoded.

    Pillow refuses no image below twice its own limit, and tries some forty formats, one by starting another program.
    InputError for more than MAX_PIXELS; OSError, ValueError or SyntaxError for no image of these formats.
    """
    hint = f"Images have at most {MAX_PIXELS} pixels. Make it smaller."
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(place, str(error), hint) from error
    if image.width * image.height > MAX_PIXELS:
        raise InputError(place, f"{image.width} x {image.height} pixels", hint)
    return image


@dataclass(frozen=True)
class SourceImage:
    """An image in a prompt, which is edited or asked about, as a PNG, JPEG, WebP or BMP file; one digest, one image."""

    digest: str
    content: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, content: bytes) -> "SourceImage":
        """Name a file by its digest."""
        return cls(hashlib.sha256(content).hexdigest(), content)

    def open(self, place: str | None = None) -> Image.Image:
        """Decode it as 8-bit RGB, upright, over white; InputError, with its place, if it is incomplete or too large."""
        place = place or f"source image {self.digest[:16]}"
        try:
            return to_rgb(open_image(self.content, place), place)
        except InputError:
            raise
        except (OSError, ValueError, SyntaxError) as error:
            hint = f"It is not a complete image ({type(error).__name__}). Give PNG, JPEG, WebP or BMP."
            raise InputError(place, f"{len(self.content)} bytes", hint) from error


def without_marks(prompt: str) -> str:
    """Return a plain text without the marks of its images, for a model that is given these apart from the text."""
    return prompt.replace(IMAGE_MARK, "").strip()


def encode_png(image: Image.Image) -> bytes:
    """Return the levels of an image as an RGB PNG file, without its text and colour profile."""
    if image.mode != "RGB":
        image = image.convert("RGB")
    buffer = io.BytesIO()
    # At 1024 x 1024 the default level takes five times as long for a file that is a sixth smaller.
    Image.frombytes("RGB", image.size, image.tobytes()).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def decode_stored(content: bytes, sample_id: str) -> Image.Image:
    """Decode the stored PNG of a sample, in RGB; InputError names a sample whose file is too large or incomplete."""
    place = f"image of sample {sample_id}"
    try:
        image = open_image(content, place, ("PNG",))
        image.load()
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        hint = f"It is not a complete PNG ({type(error).__name__}). Sample its rollouts again, or restore a backup."
        raise InputError(place, f"{len(content)} bytes", hint) from error
    return image if image.mode == "RGB" else image.convert("RGB")


def to_rgb(image: Image.Image, place: str) -> Image.Image:
    """Convert to 8-bit RGB, upright by the EXIF orientation, transparency over white; 16-bit greys are divided by 257.

    InputError for a mode of 32 bits, which has no known range, and for an empty, truncated or damaged image.
    """
    if 0 in image.size:
        raise InputError(place, shown_size(image), "Give an image of at least 1x1 pixel.")
    try:
        # An image from a file is decoded here at the latest.
        image.load()
        upright = ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        hint = f"It cannot be decoded ({error}). Save it again as 8-bit RGB (PNG or JPEG)."
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
    """Resize the RGB target to `size` (width, height) with Pillow's bicubic filter, which is antialiased.

    Most tensor libraries' are not (Parmar et al., 2022, "On Aliased Resizing and Surprising Subtleties in GAN
    Evaluation", arXiv:2104.11222). InputError as `require_aspect`.
    """
    if target.size == size:
        return target
    require_aspect(target.size, size, place)
    return target.resize(size, Image.Resampling.BICUBIC)


def require_aspect(target: tuple[int, int], size: tuple[int, int], place: str) -> None:
    """Raise InputError if width / height of target and image differ by more than MAX_ASPECT_PERCENT."""
    # Cross products, so that exactly the limit is decided without rounding.
    smaller, larger = sorted((target[0] * size[1], target[1] * size[0]))
    if 100 * (larger - smaller) > MAX_ASPECT_PERCENT * smaller:
        hint = (
            f"Crop it to the aspect ratio of the generated image, {size[0]}x{size[1]} pixels: a difference of more "
            f"than {MAX_ASPECT_PERCENT} % would distort it."
        )
        raise InputError(place, f"target of {target[0]}x{target[1]} pixels", hint)


def fits_reward(size: tuple[int, int], min_side: int, max_aspect: float) -> bool:
    """Say whether a reward with these bounds can score an image of this width and height."""
    return min(size) >= min_side and max(size) <= max_aspect * min(size)


def require_fit(image: Image.Image, place: str, reward: str, min_side: int, max_aspect: float) -> None:
    """Refuse an image that the reward of this name, with these bounds, cannot score."""
    if not fits_reward(image.size, min_side, max_aspect):
        hint = f"{reward} needs {shown_bounds(min_side, max_aspect)}: generate other sizes, or drop the reward."
        raise InputError(place, f"image of {shown_size(image)} pixels", hint)


def shown_bounds(min_side: int, max_aspect: float) -> str:
    """Describe a reward's bounds for a message."""
    side = f"at least {min_side} pixels per side"
    return side if math.isinf(max_aspect) else f"{side} and a long side of at most {max_aspect:g} times the short one"


def shown_size(image: Image.Image) -> str:
    """Format width and height for a message: ``64x48``."""
    return f"{image.width}x{image.height}"
