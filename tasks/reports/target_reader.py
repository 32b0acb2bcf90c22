"""Read target images of prompts for reports of a run whose input files may have moved."""

import hashlib

from PIL import Image, ImageOps

from grpo_core.errors import InputError
from grpo_core.rewards.images import open_image
from tasks.prompts.files import read_input_file
from tasks.reports.images import shrunk


class TargetReader:
    """Target images by address, each read once; missing and changed ones are recorded and left out.

    Attributes:
        missing: addresses and reasons.
    """

    def __init__(self, side: int) -> None:
        """Reduce images to at most `side` pixels; nothing is read yet."""
        self.missing: dict[str, str] = {}
        self._side = side
        self._read: dict[str, Image.Image] = {}

    def read(self, uri: str | None, sha256: str | None) -> Image.Image | None:
        """Read the image, reduced where it is large; None where it cannot be read."""
        if uri is None or uri in self.missing:
            return None
        if uri not in self._read:
            try:
                content = read_input_file(uri, place="target")
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise ValueError("it is not the file that the run was trained with")
                self._read[uri] = shrunk(over_white(open_image(content, "target")), self._side)
            except InputError as error:
                self.missing[uri] = error.hint
            except (OSError, ValueError, SyntaxError) as error:
                self.missing[uri] = str(error)
        return self._read.get(uri)


def over_white(image: Image.Image) -> Image.Image:
    """Convert an image to upright RGB, with transparent parts in white."""
    upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    clear = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
