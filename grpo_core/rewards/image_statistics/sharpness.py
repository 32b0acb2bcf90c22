"""How much fine detail the image has: falls when a policy blurs, rises when it adds grain.

Pech-Pacheco, Cristobal, Chamorro-Martinez and Fernandez-Valdivia, 2000, "Diatom Autofocusing in Brightfield
Microscopy: a Comparative Study", International Conference on Pattern Recognition: the variance of the Laplacian.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from grpo_core.rewards.images import to_rgb
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_positive


@dataclass(frozen=True)
class SharpnessReward(Reward):
    """Value variance / (variance + half), in [0, 1); raw the variance of the Laplacian in squared grey levels.

    The curve never ends, so that a change shows in the value at every level of sharpness. Photographs in focus have
    400 to 1500, printed pages some 5000, the same blurred over three pixels under 5, uniform noise 100,000; compare
    images of one size.

    Attributes:
        half: variance at which the value is 0.5.
    """

    half: float = 500.0

    name: ClassVar[str] = "sharpness"

    def __post_init__(self) -> None:
        check_positive("rewards.sharpness.half", self.half, "squared grey levels")

    @property
    def version(self) -> str:
        """The conversion to grey and the border of the filter belong to it."""
        import cv2

        return f"1+opencv-{cv2.__version__}"

    def settings(self) -> Mapping[str, object]:
        """The scale of the value."""
        return {"half": float(self.half)}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: an image of an unknown mode.
        """
        pairs = zip(batch.sample_ids, batch.images, strict=True)
        images = (to_rgb(image, f"rewards.sharpness, sample {i}") for i, image in pairs)
        variances = [laplacian_variance(image) for image in images]
        return [Score(variance / (variance + self.half), variance) for variance in variances]


def laplacian_variance(image: Image.Image) -> float:
    """Variance over all pixels of the 4-neighbour Laplacian of an RGB image's grey levels (ITU-R BT.601, 0..255)."""
    import cv2

    grey = cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2GRAY)
    # 16 bits hold every Laplacian of 8-bit levels, so its sums are whole numbers and the variance is rounded once.
    laplacian = cv2.Laplacian(grey, cv2.CV_16S, ksize=1).astype(np.int64)
    count, total = laplacian.size, int(laplacian.sum())
    variance: float = (count * int(np.square(laplacian).sum()) - total * total) / (count * count)
    return variance
