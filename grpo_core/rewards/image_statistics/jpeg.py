"""How many bytes the image takes as a JPEG: a reward that needs nothing but the image.

Black, Janner, Du, Kostrikov and Levine, 2023, "Training Diffusion Models with Reinforcement Learning" (DDPO,
arXiv:2305.13301), section 5.1: compressibility and incompressibility, the file size at quality 95.
"""

import io
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from PIL import Image, features
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.images import shown_size
from grpo_core.rewards.reward import STRICT, Positive, Reward, Score, ScoringBatch, clamp_unit

BYTES_PER_KILOBYTE = 1000
MAX_SIDE = 65_500
"""Largest side of an image that the JPEG library writes, in pixels."""


@dataclass(frozen=True, config=STRICT)
class JpegReward(Reward):
    """Value clip(size / full scale, 0, 1), or 1 minus that; raw the size in kilobytes of 1000 bytes.

    Attributes:
        quality: JPEG quality, 1 to 100.
        direction: ``compressible`` rewards small files, ``incompressible`` large ones.
        full_scale_kilobytes: size at which the value saturates; by default that of the uncompressed image
            (3 bytes per pixel), so that the value does not depend on the resolution.
    """

    quality: Annotated[int, Field(ge=1, le=100)] = 95
    direction: Literal["compressible", "incompressible"] = "compressible"
    full_scale_kilobytes: Positive | None = None

    name: ClassVar[str] = "jpeg"

    @property
    def version(self) -> str:
        """Includes the encoder: another one writes other sizes."""
        turbo = features.version("libjpeg_turbo")
        return f"1+libjpeg-turbo-{turbo}" if turbo else f"1+libjpeg-{features.version('jpg')}"

    def preflight(self) -> Sequence[str]:
        """Report a Pillow that was built without JPEG."""
        if features.check("jpg"):
            return []
        return ["rewards.jpeg: this Pillow cannot write JPEG. Install Pillow's wheel from the package index."]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample.

        Raises:
            InputError: an image of an unknown mode, or with a side over MAX_SIDE.
        """
        return [self._score_image(*pair) for pair in zip(batch.rgb_images(self.name), batch.sample_ids, strict=True)]

    def _score_image(self, image: Image.Image, sample_id: str) -> Score:
        if max(image.size) > MAX_SIDE:
            hint = f"A JPEG has at most {MAX_SIDE} pixels per side. Generate smaller images."
            raise InputError(f"rewards.jpeg, sample {sample_id}", f"image of {shown_size(image)}", hint)
        kilobytes = jpeg_bytes(image, self.quality) / BYTES_PER_KILOBYTE
        uncompressed = 3 * image.width * image.height / BYTES_PER_KILOBYTE
        share = clamp_unit(kilobytes / (self.full_scale_kilobytes or uncompressed))
        return Score(1.0 - share if self.direction == "compressible" else share, kilobytes)


def jpeg_bytes(image: Image.Image, quality: int) -> int:
    """Return the bytes of the RGB image as a baseline JPEG with 4:2:0 chroma and the standard Huffman tables."""
    # A comment or XMP block that came with the image would be written out, and counted.
    bare = Image.frombytes("RGB", image.size, image.tobytes())
    buffer = io.BytesIO()
    bare.save(buffer, format="JPEG", quality=quality, subsampling="4:2:0", optimize=False, progressive=False)
    return buffer.tell()
