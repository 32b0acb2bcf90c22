"""How tokens are sampled and images are made: the options, and which ids of a distribution they leave."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.image_size import ImageSize
from grpo_core.settings import check_fields


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Which ids of a distribution can be sampled; the cuts apply in this order, each to the ids that are left.

    Attributes:
        top_k: the k likeliest ids, and those as likely as the least likely of them; 0 cuts nothing.
        top_p: the fewest likeliest ids whose probabilities add up to at least this (Holtzman et al., 2020,
            arXiv:1904.09751); 1 cuts nothing.
        min_p: ids at least this times as probable as the likeliest (Nguyen et al., 2024, arXiv:2407.01082); 0 cuts
            nothing.

    Raises:
        InputError: a value outside its range.
    """

    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "rollout", Truncation)

    @property
    def truncates(self) -> bool:
        """Whether anything is cut."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class TokenSamplingSettings(Truncation):
    """How tokens are sampled, whatever they are rendered to.

    Attributes:
        temperature: of the token distribution.
    """

    temperature: PositiveFloat = 1.0


@dataclass(frozen=True)
class ImageSettings:
    """Which images are made, whatever makes them.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, a multiple of the model's unit.
        decode_batch_size: maximum number of images denoised and decoded at once; siblings only.
    """

    height: PositiveInt
    width: PositiveInt
    decode_batch_size: PositiveInt = 16

    @property
    def size(self) -> ImageSize:
        """The size of images whose prompt gives no other."""
        return ImageSize(self.width, self.height)
