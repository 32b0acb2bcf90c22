"""How many bytes the image takes as a JPEG: a reward that needs nothing but the image.

Black, Janner, Du, Kostrikov and Levine, 2023, "Training Diffusion Models with Reinforcement Learning" (DDPO,
arXiv:2305.13301), section 5.1: compressibility and incompressibility, the file size at quality 95.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image, features

from grpo_core.errors import InputError
from grpo_core.rewards.images import shown_size, to_rgb
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.settings import check_choice, check_integer, check_positive

BYTES_PER_KILOBYTE = 1000
MAX_SIDE = 65_500
"""Of an image that the JPEG library writes, in pixels."""

DIRECTIONS = ("compressible", "incompressible")


@dataclass(frozen=True)
class JpegReward(Reward):
    """Value clip(size / full scale, 0, 1), or 1 minus that; raw the size in kilobytes of 1000 bytes.

    Attributes:
        quality: JPEG quality, 1 to 100.
        direction: ``compressible`` rewards small files, ``incompressible`` large ones.
        full_scale_kilobytes: size at which the value ends; by default that of the uncompressed image
            (3 bytes a pixel), so that the value does not depend on the resolution.
    """

    quality: int = 95
    direction: str = "compressible"
    full_scale_kilobytes: float | None = None

    name: ClassVar[str] = "jpeg"

    def __post_init__(self) -> None:
        check_integer("rewards.jpeg.quality", self.quality, 1, 100)
        check_choice("rewards.jpeg.direction", self.direction, DIRECTIONS)
        if self.full_scale_kilobytes is not None:
            check_positive("rewards.jpeg.full_scale_kilobytes", self.full_scale_kilobytes, "kilobytes")

    @property
    def version(self) -> str:
        """The encoder belongs to it: another one writes other sizes."""
        turbo = features.version("libjpeg_turbo")
        return f"1+libjpeg-turbo-{turbo}" if turbo else f"1+libjpeg-{features.version('jpg')}"

    def settings(self) -> Mapping[str, object]:
        """Quality, direction and scale."""
        return {
            "quality": self.quality,
            "direction": self.direction,
            "full_scale_kilobytes": None if self.full_scale_kilobytes is None else float(self.full_scale_kilobytes),
        }

    def preflight(self) -> Sequence[str]:
        """Says so where Pillow was built without JPEG."""
        if features.check("jpg"):
            return []
        return ["rewards.jpeg: this Pillow cannot write JPEG. Install Pillow's wheel from the package index."]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: an image of an unknown mode, or with a side over MAX_SIDE.
        """
        pairs = zip(batch.sample_ids, batch.images, strict=True)
        return [self._score_image(image, f"rewards.jpeg, sample {i}") for i, image in pairs]

    def _score_image(self, image: Image.Image, place: str) -> Score:
        image = to_rgb(image, place)
        if max(image.size) > MAX_SIDE:
            hint = f"A JPEG has at most {MAX_SIDE} pixels a side. Generate smaller images."
            raise InputError(place, f"image of {shown_size(image)}", hint)
        kilobytes = jpeg_bytes(image, self.quality) / BYTES_PER_KILOBYTE
        uncompressed = 3 * image.width * image.height / BYTES_PER_KILOBYTE
        share = clamp_unit(kilobytes / (self.full_scale_kilobytes or uncompressed))
        return Score(1.0 - share if self.direction == "compressible" else share, kilobytes)


def jpeg_bytes(image: Image.Image, quality: int) -> int:
    """Size in bytes of the RGB image as a baseline JPEG with 4:2:0 chroma and the standard Huffman tables."""
    # A comment or XMP block that came with the image would be written out, and counted.
    bare = Image.frombytes("RGB", image.size, image.tobytes())
    buffer = io.BytesIO()
    bare.save(buffer, format="JPEG", quality=quality, subsampling="4:2:0", optimize=False, progressive=False)
    return buffer.tell()
