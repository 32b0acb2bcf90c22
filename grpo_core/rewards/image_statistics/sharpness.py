"""How much fine detail the image has: falls when a policy blurs, rises when it adds grain.

Pech-Pacheco, Cristobal, Chamorro-Martinez and Fernandez-Valdivia, 2000, "Diatom Autofocusing in Brightfield
Microscopy: a Comparative Study", International Conference on Pattern Recognition: the variance of the Laplacian.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image
from pydantic.dataclasses import dataclass

from grpo_core.rewards.reward import STRICT, Positive, Reward, Score, ScoringBatch


@dataclass(frozen=True, config=STRICT)
class SharpnessReward(Reward):
    """Value variance / (variance + half), in [0, 1); raw the variance of the Laplacian in squared grey levels.

    The curve never ends, so that a change shows in the value at every level of sharpness. Photographs in focus have
    400 to 1500, printed pages some 5000, the same blurred over three pixels under 5, uniform noise 100,000; compare
    images of one size.

    Attributes:
        half: variance at which the value is 0.5.
    """

    half: Positive = 500.0

    name: ClassVar[str] = "sharpness"

    @property
    def version(self) -> str:
        """Includes the conversion to grey and the border of the filter."""
        import cv2

        return f"1+opencv-{cv2.__version__}"

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample.

        Raises:
            InputError: an image of an unknown mode.
        """
        variances = [laplacian_variance(image) for image in batch.rgb_images(self.name)]
        return [Score(variance / (variance + self.half), variance) for variance in variances]


def laplacian_variance(image: Image.Image) -> float:
    """Compute the variance of the 4-neighbour Laplacian over an RGB image's grey levels (ITU-R BT.601, 0..255)."""
    import cv2

    grey = cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2GRAY)
    # Every Laplacian of 8-bit levels fits into 16 bits, so its sums are whole numbers and the variance is rounded once.
    laplacian = cv2.Laplacian(grey, cv2.CV_16S, ksize=1).astype(np.int64)
    count, total = laplacian.size, int(laplacian.sum())
    variance: float = (count * int(np.square(laplacian).sum()) - total * total) / (count * count)
    return variance
