"""Mean squared error to the target image."""

from typing import ClassVar

from jaxtyping import Float32, Float64
from pydantic.dataclasses import dataclass
from torch import Tensor

from grpo_core.rewards.reward import STRICT, Positive, clamp_unit
from grpo_core.rewards.similarity.pairs import PairReward
from grpo_core.rewards.tensors import check_pair


@dataclass(frozen=True, config=STRICT)
class MseReward(PairReward):
    """Value 1 - clip(MSE / full_scale, 0, 1); raw the mean squared error over levels in [0, 1].

    Attributes:
        full_scale: error from which the value is 0. The default, 0.25, is what flat mid-grey has at worst, against a
            target of pure black and white; independent uniform noise has 1/6, and only black against white has 1.
    """

    full_scale: Positive = 0.25

    name: ClassVar[str] = "mse"
    version: ClassVar[str] = "1"

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the errors."""
        return mean_squared_error(images, targets)

    def to_value(self, raw: float) -> float:
        """Return 1 without error, 0 from `full_scale` on."""
        return 1.0 - clamp_unit(raw / self.full_scale)


def mean_squared_error(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float64[Tensor, " batch"]:
    """Average the squared difference over pixels and channels, in [0, 1].

    Args:
        images: in [0, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    check_pair(images, targets)
    return (images.double() - targets.double()).square().flatten(1).mean(1)
