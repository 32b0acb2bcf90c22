"""How tokens are sampled and images are made: the options, and which ids of a distribution they leave."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize


@dataclass(frozen=True)
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

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise InputError("rollout.top_k", self.top_k, "Give a number of ids, or 0 for all of them.")
        if not 0 < self.top_p <= 1:
            raise InputError("rollout.top_p", self.top_p, "Give a probability above 0; 1 keeps every id.")
        if not 0 <= self.min_p < 1:
            raise InputError("rollout.min_p", self.min_p, "Give a fraction from 0 to below 1; 0 keeps every id.")

    @property
    def active(self) -> bool:
        """Whether anything is cut."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class TokenSamplingSettings:
    """How tokens are sampled, whatever they are rendered to.

    Attributes:
        temperature: of the token distribution.
        top_k: only the k likeliest ids can be sampled; 0: off.
        top_p: only the likeliest ids that together have this probability can be sampled; 1: off.
        min_p: only ids at least this times as probable as the likeliest can be sampled; 0: off.
    """

    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def truncation(self) -> Truncation:
        """Which ids can be sampled.

        Raises:
            InputError: a value outside its range.
        """
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


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
