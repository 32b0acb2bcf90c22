"""Statistics of single images that need nothing but the image: JPEG size, edges, sharpness, colours.

- jpeg: Black, Janner, Du, Kostrikov and Levine, 2023, "Training Diffusion Models with Reinforcement Learning" (DDPO,
  arXiv:2305.13301), section 5.1: the file size at quality 95.
- edge_density: Canny, 1986, "A Computational Approach to Edge Detection", IEEE Transactions on Pattern Analysis and
  Machine Intelligence 8(6). It falls with flat areas, and rises with texture or noise.
- sharpness: Pech-Pacheco, Cristobal, Chamorro-Martinez and Fernandez-Valdivia, 2000, "Diatom Autofocusing in
  Brightfield Microscopy: a Comparative Study", International Conference on Pattern Recognition. It falls with blur.
- colour_entropy: Shannon, 1948, "A Mathematical Theory of Communication", section 6, of the joint RGB histogram. It
  falls when a policy narrows to a palette.
"""

import abc
import io
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from PIL import Image, features
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Positive, Reward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch, clamp_unit
from grpo_core.rollouts.images import shown_size

BYTES_PER_KILOBYTE = 1000
MAX_JPEG_SIDE = 65_500
"""Largest side of an image that the JPEG library writes, in pixels."""


class StatisticReward(Reward):
    """A reward of each image by itself."""

    @abc.abstractmethod
    def score_image(self, image: Image.Image, place: str) -> Score:
        """Score an RGB image; `place` names the sample in messages."""

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample."""
        named = zip(batch.sample_ids, batch.rgb_images(self.name), strict=True)
        return [self.score_image(image, f"rewards.{self.name}, sample {sample_id}") for sample_id, image in named]


class OpenCvReward(StatisticReward):
    """A statistic that OpenCV computes."""

    @property
    def version(self) -> str:
        """Includes OpenCV: detector, conversion to grey, border of the filter."""
        import cv2

        return f"1+opencv-{cv2.__version__}"


@dataclass(frozen=True, config=STRICT)
class JpegReward(StatisticReward):
    """Value clip(size / full scale, 0, 1), or 1 minus that; raw the size in kilobytes of 1000 bytes.

    Attributes:
        quality: JPEG quality, 1 to 100.
        direction: ``compressible`` rewards small files, ``incompressible`` large ones.
        full_scale_kilobytes: size at which the value saturates; by default that of the uncompressed image, 3 bytes per
            pixel.
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

    def score_image(self, image: Image.Image, place: str) -> Score:
        """Score an image by the bytes of its file."""
        if max(image.size) > MAX_JPEG_SIDE:
            hint = f"A JPEG has at most {MAX_JPEG_SIDE} pixels per side. Generate smaller images."
            raise InputError(place, f"image of {shown_size(image)}", hint)
        kilobytes = jpeg_bytes(image, self.quality) / BYTES_PER_KILOBYTE
        uncompressed = 3 * image.width * image.height / BYTES_PER_KILOBYTE
        share = clamp_unit(kilobytes / (self.full_scale_kilobytes or uncompressed))
        return Score(1.0 - share if self.direction == "compressible" else share, kilobytes)


@dataclass(frozen=True, config=STRICT)
class EdgeDensityReward(OpenCvReward):
    """Value and raw: the share of pixels that are edges, in [0, 1].

    Thin lines keep their width, so compare images of one size. Independent uniform noise has 0.36, photographs in focus
    0.12 to 0.15.

    Attributes:
        low: gradient (Sobel 3x3 over 0..255, Euclidean) from which a pixel next to an edge belongs to it.
        high: gradient from which an edge starts; Canny advises two to three times `low`.
    """

    low: Positive = 50.0
    high: Positive = 100.0

    name: ClassVar[str] = "edge_density"

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise InputError("rewards.edge_density.high", self.high, f"Set a threshold of at least low, {self.low}.")

    def score_image(self, image: Image.Image, place: str) -> Score:
        """Score an image by its edges."""
        share = edge_share(image, self.low, self.high)
        return Score(share, share)


@dataclass(frozen=True, config=STRICT)
class SharpnessReward(OpenCvReward):
    """Value variance / (variance + half), in [0, 1); raw the variance of the Laplacian in squared grey levels.

    Photographs in focus have 400 to 1500, printed pages some 5000, the same blurred over three pixels under 5, uniform
    noise 100,000; compare images of one size.

    Attributes:
        half: variance at which the value is 0.5.
    """

    half: Positive = 500.0

    name: ClassVar[str] = "sharpness"

    def score_image(self, image: Image.Image, place: str) -> Score:
        """Score an image by its Laplacian."""
        variance = laplacian_variance(image)
        return Score(variance / (variance + self.half), variance)


@dataclass(frozen=True, config=STRICT)
class ColourEntropyReward(StatisticReward):
    """Value entropy / (3 log2 bins), in [0, 1]; raw the entropy in bits, at most log2(pixels).

    8 bins per channel, 512 cells, suit images from 64x64 pixels on.

    Attributes:
        bins: equal ranges that each channel's 256 levels are divided into, 2 to 64.
    """

    bins: Annotated[int, Field(ge=2, le=64)] = 8

    name: ClassVar[str] = "colour_entropy"
    version: ClassVar[str] = "1"

    def score_image(self, image: Image.Image, place: str) -> Score:
        """Score an image by its histogram."""
        bits = colour_entropy_bits(image, self.bins)
        return Score(min(bits / (3.0 * math.log2(self.bins)), 1.0), bits)


def jpeg_bytes(image: Image.Image, quality: int) -> int:
    """Return the bytes of the RGB image as a baseline JPEG with 4:2:0 chroma and the standard Huffman tables."""
    # A comment or XMP block that came with the image would be written out, and counted.
    bare = Image.frombytes("RGB", image.size, image.tobytes())
    buffer = io.BytesIO()
    bare.save(buffer, format="JPEG", quality=quality, subsampling="4:2:0", optimize=False, progressive=False)
    return buffer.tell()


def edge_share(image: Image.Image, low: float, high: float) -> float:
    """Return the share of an RGB image's pixels that are edges, in the channel with the steepest gradient of each."""
    import cv2

    edges = cv2.Canny(np.asarray(image), low, high, apertureSize=3, L2gradient=True)
    share: float = cv2.countNonZero(edges) / edges.size
    return share


def laplacian_variance(image: Image.Image) -> float:
    """Compute the variance of the 4-neighbour Laplacian over an RGB image's grey levels (ITU-R BT.601, 0..255)."""
    import cv2

    grey = cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2GRAY)
    # Every Laplacian of 8-bit levels fits into 16 bits, so its sums are whole numbers and the variance is rounded once.
    laplacian = cv2.Laplacian(grey, cv2.CV_16S, ksize=1).astype(np.int64)
    count, total = laplacian.size, int(laplacian.sum())
    variance: float = (count * int(np.square(laplacian).sum()) - total * total) / (count * count)
    return variance


def colour_entropy_bits(image: Image.Image, bins: int) -> float:
    """Compute the bits of entropy of an RGB image's joint histogram, `bins` ranges per channel; 0 for one colour."""
    levels = np.asarray(image).reshape(-1, 3).astype(np.int64) * bins // 256
    cells = (levels[:, 0] * bins + levels[:, 1]) * bins + levels[:, 2]
    counts = np.bincount(cells)
    shares = counts[counts > 0] / len(cells)
    # Exactly rounded, so that it depends on the counts alone and not on how many were added at a time.
    return math.fsum(-share * math.log2(share) for share in shares.tolist())
