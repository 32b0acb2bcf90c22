"""How many colours the image uses, and how evenly: falls when a policy narrows to a palette.

Shannon, 1948, "A Mathematical Theory of Communication", section 6, of the image's joint RGB histogram.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.rewards.reward import STRICT, Reward, Score, ScoringBatch


@dataclass(frozen=True, config=STRICT)
class ColourEntropyReward(Reward):
    """Value entropy / (3 log2 bins), in [0, 1]; raw the entropy in bits.

    An image of n pixels has at most log2(n) bits, and the histogram of a small one says too little where it has more
    cells than the image has pixels: 8 bins per channel, 512 cells, suit images from 64x64 pixels on.

    Attributes:
        bins: equal ranges that each channel's 256 levels are divided into, 2 to 64.
    """

    bins: Annotated[int, Field(ge=2, le=64)] = 8

    name: ClassVar[str] = "colour_entropy"
    version: ClassVar[str] = "1"

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample.

        Raises:
            InputError: an image of an unknown mode.
        """
        entropies = [colour_entropy_bits(image, self.bins) for image in batch.rgb_images(self.name)]
        return [Score(min(bits / (3.0 * math.log2(self.bins)), 1.0), bits) for bits in entropies]


def colour_entropy_bits(image: Image.Image, bins: int) -> float:
    """Compute the bits of entropy of an RGB image's joint histogram, `bins` ranges per channel; 0 for one colour."""
    levels = np.asarray(image).reshape(-1, 3).astype(np.int64) * bins // 256
    cells = (levels[:, 0] * bins + levels[:, 1]) * bins + levels[:, 2]
    counts = np.bincount(cells)
    shares = counts[counts > 0] / len(cells)
    # Exactly rounded, so that it depends on the counts alone and not on how many were added at a time.
    return math.fsum(-share * math.log2(share) for share in shares.tolist())
