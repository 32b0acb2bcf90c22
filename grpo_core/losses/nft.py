"""DiffusionNFT's loss: a regression on finished latents that are noised again, without importance ratios."""

from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

from grpo_core.transfers import to_device

SMALLEST_ERROR = 1e-5
"""Errors are divided by their mean size, which is at least this."""


@dataclass(frozen=True)
class NoisedImages:
    """Finished latents of images, and what the model reads: noised = (1 - sigma) image + sigma noise."""

    images: Float[Tensor, "rows ..."]
    noised: Float[Tensor, "rows ..."]
    sigmas: Float[Tensor, " rows"]
    advantages: Float[Tensor, " rows"]

    def to(self, other: Tensor) -> "NoisedImages":
        """Return the same with the device and the dtype of another tensor."""
        moved = to_device([getattr(self, each.name) for each in fields(self)], other.device)
        return NoisedImages(*(each.to(other.dtype) for each in moved))


@dataclass(frozen=True)
class NftTerms:
    """One value per row: errors of both policies weighted by the advantage, with gradient, then each error alone."""

    policy: Float[Tensor, " rows"]
    positive: Float[Tensor, " rows"]
    negative: Float[Tensor, " rows"]


def nft_terms(
    velocity: Float[Tensor, "rows ..."],
    old: Float[Tensor, "rows ..."],
    noised: NoisedImages,
    *,
    beta: float,
    advantage_clip: float,
) -> NftTerms:
    """Return advantage_clip / beta * (r positive + (1 - r) negative), with r = clip(A / advantage_clip) / 2 + 1/2.

    Positive and negative are the errors of the implicit policies old +- beta (velocity - old), on either side of the
    old policy. At r = 1/2 and velocity = old both are equal and their gradients cancel. `velocity` has a gradient.
    """
    moved = beta * (velocity - old)
    positive, negative = _error(old + moved, noised), _error(old - moved, noised)
    weights = (noised.advantages / advantage_clip).clamp(-1, 1) / 2 + 0.5
    policy = advantage_clip / beta * (weights * positive + (1 - weights) * negative)
    return NftTerms(policy, positive.detach(), negative.detach())


def mean_square(values: Float[Tensor, "rows ..."]) -> Float[Tensor, " rows"]:
    """Return the mean square of each row's values."""
    return values.square().flatten(1).mean(1)


def _error(velocity: Float[Tensor, "rows ..."], noised: NoisedImages) -> Float[Tensor, " rows"]:
    """Return the mean squared error of the image that a velocity leads to, over its mean absolute error."""
    sigmas = noised.sigmas.view(-1, *(1,) * (velocity.ndim - 1))
    error = noised.noised - sigmas * velocity - noised.images
    # A constant: levels with much noise, where the errors are large, then weigh no more than the others.
    size = error.detach().abs().flatten(1).mean(1).clamp(min=SMALLEST_ERROR)
    return mean_square(error) / size
