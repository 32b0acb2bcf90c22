"""How much of the image is edges: falls when a policy paints flat areas, rises when it paints texture or noise.

Canny, 1986, "A Computational Approach to Edge Detection", IEEE Transactions on Pattern Analysis and Machine
Intelligence 8(6), as OpenCV computes it.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Positive, Reward, Score, ScoringBatch


@dataclass(frozen=True, config=STRICT)
class EdgeDensityReward(Reward):
    """Value and raw: the share of pixels that are edges, in [0, 1].

    Thin lines keep their width, so the same drawing at twice the size has about half the density: compare images of
    one size. Independent uniform noise has 0.36, photographs in focus 0.12 to 0.15.

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

    @property
    def version(self) -> str:
        """Includes the detector."""
        import cv2

        return f"1+opencv-{cv2.__version__}"

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample.

        Raises:
            InputError: an image of an unknown mode.
        """
        shares = [edge_share(image, self.low, self.high) for image in batch.rgb_images(self.name)]
        return [Score(share, share) for share in shares]


def edge_share(image: Image.Image, low: float, high: float) -> float:
    """Count the edge pixels of an RGB image, over all pixels.

    At every pixel the channel with the steepest gradient counts, so that an edge between two colours of one brightness
    is an edge too.
    """
    import cv2

    edges = cv2.Canny(np.asarray(image), low, high, apertureSize=3, L2gradient=True)
    share: float = cv2.countNonZero(edges) / edges.size
    return share
