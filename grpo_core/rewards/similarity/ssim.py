"""Structural similarity to the target image.

Wang, Bovik, Sheikh and Simoncelli, 2004, "Image Quality Assessment: From Error Visibility to Structural Similarity",
equation 13 with the constants of section III.B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytorch_msssim
from jaxtyping import Float32
from torch import Tensor

from grpo_core.rewards.images import check_pair
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.similarity.pairs import score_pairs

WINDOW = 11
"""Side of the Gaussian window in pixels; also the smallest image, as only whole windows count."""


@dataclass(frozen=True)
class SsimReward(Reward):
    """Value max(SSIM, 0); raw SSIM in [-1, 1], 1 for identical images."""

    name: ClassVar[str] = "ssim"
    version: ClassVar[str] = "1"
    needs_target: ClassVar[bool] = True
    min_side: ClassVar[int] = WINDOW

    def settings(self) -> Mapping[str, object]:
        """None: the window and the constants are the paper's."""
        return {}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: an image has a side under 11 pixels, or its target another aspect ratio.
        """
        return score_pairs(batch, structural_similarity, clamp_unit, name=self.name, min_side=WINDOW)


def structural_similarity(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float32[Tensor, " batch"]:
    """Mean SSIM over whole windows and over the three channels: Gaussian 11x11, sigma 1.5, K1 0.01, K2 0.03.

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
