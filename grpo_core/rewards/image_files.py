"""Images as they lie in files and tables: which kinds are read, and how large one may be, before it is decoded."""

import io

from PIL import Image

from grpo_core.errors import InputError

MAX_PIXELS = 8192 * 8192
"""Largest width times height of an image from anywhere; a small file can unpack to more than the memory holds."""

GIVEN_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""What people may give."""

_STORED_FORMATS = ("PNG",)


def open_image(content: bytes, place: str, formats: tuple[str, ...] = GIVEN_FORMATS) -> Image.Image:
    """The image with its header read and its size checked; no pixel is decoded.

    Pillow warns of large images and refuses none below twice its own limit, and it would try each of some forty
    formats, one of which starts another program.

    Args:
        content: of the file.
        place: where the image stands, for the message.
        formats: Pillow's names of those that are read.

    Raises:
        InputError: more than MAX_PIXELS.
        OSError, ValueError, SyntaxError: no image of these formats.
    """
    hint = f"Images have at most {MAX_PIXELS} pixels. Make it smaller."
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(place, str(error), hint) from error
    if image.width * image.height > MAX_PIXELS:
        raise InputError(place, f"{image.width} x {image.height} pixels", hint)
    return image


def decode_stored(content: bytes, sample_id: str) -> Image.Image:
    """The image of a sample as its rollout keeps it, decoded, in RGB.

    Raises:
        InputError: more than MAX_PIXELS, or not a whole PNG; names the sample.
    """
    place = f"image of sample {sample_id}"
    try:
        image = open_image(content, place, _STORED_FORMATS)
        image.load()
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        hint = f"It is not a whole PNG ({type(error).__name__}). Make its rollouts again, or take them from a backup."
        raise InputError(place, f"{len(content)} bytes", hint) from error
    return image if image.mode == "RGB" else image.convert("RGB")
