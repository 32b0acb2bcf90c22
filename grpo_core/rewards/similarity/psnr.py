"""Peak signal-to-noise ratio to the target image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float32, Float64
from torch import Tensor

from grpo_core.rewards.images import check_pair
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.settings import check_positive
from grpo_core.rewards.similarity.pairs import score_pairs

MIN_MSE = 1e-10
"""Floor of the mean squared error: identical images have 100 dB instead of infinity."""


@dataclass(frozen=True)
class PsnrReward(Reward):
    """Value clip(PSNR / full_scale_db, 0, 1); raw PSNR in dB, at most 100.

    Attributes:
        full_scale_db: PSNR in dB from which the value is 1.
    """

    full_scale_db: float = 50.0

    name: ClassVar[str] = "psnr"
    version: ClassVar[str] = "1"
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("rewards.psnr.full_scale_db", self.full_scale_db, "decibels")

    def settings(self) -> Mapping[str, object]:
        """The scale of the value."""
        return {"full_scale_db": float(self.full_scale_db)}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: a target has another aspect ratio than its image.
        """

        def to_value(psnr: float) -> float:
            return clamp_unit(psnr / self.full_scale_db)

        return score_pairs(batch, peak_signal_to_noise_ratio, to_value, name=self.name, min_side=self.min_side)


def peak_signal_to_noise_ratio(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float64[Tensor, " batch"]:
    """10 log10(1 / MSE) in dB, the MSE over pixels and channels and at least MIN_MSE.

    Args:
        images: in [0, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    check_pair(images, targets)
    mse = (images.double() - targets.double()).square().flatten(1).mean(1)
    return -10.0 * mse.clamp(min=MIN_MSE).log10()
