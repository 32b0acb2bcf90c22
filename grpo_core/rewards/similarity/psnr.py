"""Peak signal-to-noise ratio to the target image."""

from typing import ClassVar

from jaxtyping import Float32, Float64
from pydantic.dataclasses import dataclass
from torch import Tensor

from grpo_core.rewards.reward import STRICT, Positive, clamp_unit
from grpo_core.rewards.similarity.mse import mean_squared_error
from grpo_core.rewards.similarity.pairs import PairReward

MIN_MSE = 1e-10
"""Floor of the mean squared error: identical images have 100 dB instead of infinity."""


@dataclass(frozen=True, config=STRICT)
class PsnrReward(PairReward):
    """Value clip(PSNR / full_scale_db, 0, 1); raw PSNR in dB, at most 100.

    Attributes:
        full_scale_db: PSNR in dB from which the value is 1.
    """

    full_scale_db: Positive = 50.0

    name: ClassVar[str] = "psnr"
    version: ClassVar[str] = "1"

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the ratios."""
        return peak_signal_to_noise_ratio(images, targets)

    def to_value(self, raw: float) -> float:
        """Return the ratio as a share of `full_scale_db`."""
        return clamp_unit(raw / self.full_scale_db)


def peak_signal_to_noise_ratio(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float64[Tensor, " batch"]:
    """Compute 10 log10(1 / MSE) in dB, the MSE over pixels and channels and at least MIN_MSE.

    Args:
        images: in [0, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    return -10.0 * mean_squared_error(images, targets).clamp(min=MIN_MSE).log10()
