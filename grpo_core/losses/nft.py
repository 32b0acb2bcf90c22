"""The loss of DiffusionNFT (Zheng et al., 2025, arXiv:2509.16117, equation 5, with its self-normalized x0 regression).

An image is learned from by two implicit policies on either side of the old policy: the positive one, on the side of the
trained policy, where its advantage is high, and the negative one, on the other side, where it is low.
"""

from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

SMALLEST_ERROR = 1e-5
"""Errors are divided by their mean size, which is at least this."""


@dataclass(frozen=True)
class NoisedImages:
    """Latents of images with noise added again: noised = (1 - sigma) image + sigma noise.

    Attributes:
        images: finished latents.
        noised: what the model reads.
        sigmas: noise levels.
        advantages: of the images.
    """

    images: Float[Tensor, "rows ..."]
    noised: Float[Tensor, "rows ..."]
    sigmas: Float[Tensor, " rows"]
    advantages: Float[Tensor, " rows"]

    def to(self, other: Tensor) -> "NoisedImages":
        """Return the same with the device and the dtype of another tensor."""
        return NoisedImages(*(getattr(self, each.name).to(other) for each in fields(self)))


@dataclass(frozen=True)
class NftTerms:
    """The terms of the loss, one per row.

    Attributes:
        policy: positive and negative error, weighted by the advantage; with gradient.
        positive: error of the positive policy, a constant like the next.
        negative: error of the negative policy.
    """

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

    At r = 1/2 and velocity = old both errors are equal and their gradients cancel.

    Args:
        velocity: of the policy that is trained, with gradient.
        old: of the old policy, a constant.
        noised: what both were computed at.
        beta: the implicit policies are old +- beta (velocity - old).
        advantage_clip: advantages are clipped to [-advantage_clip, advantage_clip].
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
