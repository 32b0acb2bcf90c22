"""Image files that prompts name, as targets or sources: which names are allowed, and errors in their content."""

import posixpath
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image

from grpo_core.errors import InputError
from grpo_core.rollouts.streams import ImageSize

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")  # of file names, in upper or lower case

_FORMATS = "Give PNG, JPEG, WebP or BMP."


def name_inside(value: object, place: str, *, folder: str, empty: str) -> str:
    """Return a normalised path below a folder; InputError for no name, no image's, or one that leads out of it."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(place, value, empty)
    name = posixpath.normpath(value)
    # A prompt file may come from anywhere: it must not choose which other files are read.
    if posixpath.isabs(value) or name == ".." or name.startswith(("../", "~")) or "::" in value or "://" in value:
        raise InputError(place, value, f"The name leads out of {folder}. Name a file inside it.")
    if not name.lower().endswith(IMAGE_ENDINGS):
        raise InputError(place, value, f"Images are {', '.join(IMAGE_ENDINGS)}. Convert it to one of these.")
    return name


@contextmanager
def complete_image(named: object, place: str) -> Iterator[None]:
    """Turn the errors of decoding an image into InputError; `named` says which image it is."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, struct.error) as error:
        hint = f"It is not a complete image ({type(error).__name__}). {_FORMATS}"
        raise InputError(place, named, hint) from error


def upright_size(image: Image.Image) -> ImageSize:
    """Return the upright width and height after the EXIF orientation, without decoding."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return ImageSize(image.height, image.width) if turned else ImageSize(*image.size)
