"""Structural similarity to the target image.

Wang, Bovik, Sheikh and Simoncelli, 2004, "Image Quality Assessment: From Error Visibility to Structural Similarity",
equation 13 with the constants of section III.B.
"""

from typing import ClassVar

import pytorch_msssim
from jaxtyping import Float32
from pydantic.dataclasses import dataclass
from torch import Tensor

from grpo_core.rewards.reward import STRICT, clamp_unit
from grpo_core.rewards.similarity.pairs import PairReward
from grpo_core.rewards.tensors import check_pair

WINDOW = 11
"""Side of the Gaussian window in pixels; also the smallest image, because only complete windows count."""


@dataclass(frozen=True, config=STRICT)
class SsimReward(PairReward):
    """Value max(SSIM, 0); raw SSIM in [-1, 1], 1 for identical images."""

    name: ClassVar[str] = "ssim"
    version: ClassVar[str] = "1"
    min_side: ClassVar[int] = WINDOW

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the similarities."""
        return structural_similarity(images, targets)

    def to_value(self, raw: float) -> float:
        """Return the similarity, at least 0."""
        return clamp_unit(raw)


def structural_similarity(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float32[Tensor, " batch"]:
    """Average SSIM over complete windows and the three channels: Gaussian 11x11, sigma 1.5, K1 0.01, K2 0.03.

    Args:
        images: in [0, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range, or a side under 11 pixels.
    """
    check_pair(images, targets)
    if min(images.shape[-2:]) < WINDOW:
        # Without this the blur is left out along the short side, and a number comes back all the same.
        raise ValueError(f"expected sides of at least {WINDOW} pixels, got {list(images.shape)}")
    similarity: Tensor = pytorch_msssim.ssim(
        images, targets, data_range=1.0, size_average=False, win_size=WINDOW, win_sigma=1.5, K=(0.01, 0.03)
    )
    return similarity
