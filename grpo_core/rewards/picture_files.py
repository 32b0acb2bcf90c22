"""Pictures as they lie in files and tables: which kinds are read, and how large one may be, before it is decoded."""

import io

from PIL import Image

from grpo_core.errors import InputError

MAX_PIXELS = 8192 * 8192
"""Largest width times height of a picture from anywhere; a small file can unpack to more than the memory holds."""

GIVEN_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""What people may give."""

_STORED_FORMATS = ("PNG",)


def open_picture(content: bytes, place: str, formats: tuple[str, ...] = GIVEN_FORMATS) -> Image.Image:
    """The picture with its header read and its size checked; no pixel is decoded.

    Pillow warns of large pictures and refuses none below twice its own limit, and it would try each of some forty
    formats, one of which starts another program.

    Args:
        content: of the file.
        place: where the picture stands, for the message.
        formats: Pillow's names of those that are read.

    Raises:
        InputError: more than MAX_PIXELS.
        OSError, ValueError, SyntaxError: no picture of these formats.
    """
    mend = f"Pictures have at most {MAX_PIXELS} pixels. Make it smaller."
    try:
        picture = Image.open(io.BytesIO(content), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(place, str(error), mend) from error
    if picture.width * picture.height > MAX_PIXELS:
        raise InputError(place, f"{picture.width} x {picture.height} pixels", mend)
    return picture


def decode_stored(content: bytes, sample_id: str) -> Image.Image:
    """The picture of a sample as its rollout keeps it, decoded, in RGB.

    Raises:
        InputError: more than MAX_PIXELS, or not a whole PNG; names the sample.
    """
    place = f"picture of sample {sample_id}"
    try:
        picture = open_picture(content, place, _STORED_FORMATS)
        picture.load()
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        mend = f"It is not a whole PNG ({type(error).__name__}). Make its rollouts again, or take them from a backup."
        raise InputError(place, f"{len(content)} bytes", mend) from error
    return picture if picture.mode == "RGB" else picture.convert("RGB")
