"""Mean squared error to the target image."""

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


@dataclass(frozen=True)
class MseReward(Reward):
    """Value 1 - clip(MSE / full_scale, 0, 1); raw the mean squared error over levels in [0, 1].

    Attributes:
        full_scale: error from which the value is 0. The default, 0.25, is what flat mid-grey has at worst, against a
            target of pure black and white; independent uniform noise has 1/6, and only black against white has 1.
    """

    full_scale: float = 0.25

    name: ClassVar[str] = "mse"
    version: ClassVar[str] = "1"
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("rewards.mse.full_scale", self.full_scale, "squared levels")

    def settings(self) -> Mapping[str, object]:
        """The scale of the value."""
        return {"full_scale": float(self.full_scale)}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: a target has another aspect ratio than its image.
        """

        def to_value(mse: float) -> float:
            return 1.0 - clamp_unit(mse / self.full_scale)

        return score_pairs(batch, mean_squared_error, to_value, name=self.name, min_side=self.min_side)


def mean_squared_error(
    images: Float32[Tensor, "batch 3 height width"], targets: Float32[Tensor, "batch 3 height width"]
) -> Float64[Tensor, " batch"]:
    """Mean over pixels and channels of the squared difference, in [0, 1].

    Args:
        images: in [0, 1].
        targets: in [0, 1], of the same shape.

    Raises:
        ValueError: another dtype, shape or range.
    """
    check_pair(images, targets)
    return (images.double() - targets.double()).square().flatten(1).mean(1)
