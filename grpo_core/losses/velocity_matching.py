"""The losses of velocities at finished latents that are noised again, without a sampler's log-probs."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.losses.ratios import importance_ratio
from grpo_core.losses.settings import ImplicitPair, SignedRow, VelocityRow
from grpo_core.transfers import to_device

SMALLEST_ERROR = 1e-5
"""Errors are divided by their mean size, which is at least this."""
ROUNDED_OFF = 1e-10
"""Is added to a squared error before its root is taken, as in AWM's code; its own root is subtracted again."""


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
class VelocityTerms:
    """One value per row: the policy loss, with gradient, and what its method measures, without."""

    policy: Float[Tensor, " rows"]
    measured: tuple[Float[Tensor, " rows"], ...]


def velocity_terms(
    velocity: Float[Tensor, "rows ..."], old: Float[Tensor, "rows ..."], noised: NoisedImages, row: VelocityRow
) -> VelocityTerms:
    """Return the terms of a row's kind; `velocity` has a gradient, and `old` is of the policy before the update."""
    return (
        _pair_terms(velocity, old, noised, row)
        if isinstance(row, ImplicitPair)
        else _signed_terms(velocity, old, noised, row)
    )


def _pair_terms(
    velocity: Float[Tensor, "rows ..."], old: Float[Tensor, "rows ..."], noised: NoisedImages, row: ImplicitPair
) -> VelocityTerms:
    """Return clip / beta * (r positive + (1 - r) negative), with r = clip(A / clip) / 2 + 1/2.

    Positive and negative, which are measured with the mean square of velocity - old, are the errors of the implicit
    policies old +- beta (velocity - old), on either side of the old policy. At r = 1/2 and velocity = old both are
    equal and their gradients cancel.
    """
    moved = row.beta * (velocity - old)
    positive, negative = _error_over_size(old + moved, noised), _error_over_size(old - moved, noised)
    weights = (noised.advantages / row.clip).clamp(-1, 1) / 2 + 0.5
    policy = row.clip / row.beta * (weights * positive + (1 - weights) * negative)
    return VelocityTerms(policy, (positive.detach(), negative.detach(), mean_square((velocity - old).detach())))


def _signed_terms(
    velocity: Float[Tensor, "rows ..."], old: Float[Tensor, "rows ..."], noised: NoisedImages, row: SignedRow
) -> VelocityTerms:
    """Return A' error, or with a clip range -min(ratio A', clip(ratio) A') with the ratio exp(old error - error).

    Measured: the mean square of velocity - (noise - image), and 1 where the ratio is clipped.
    """
    error, advantages = _signed_error(velocity, noised, row), _bounded(noised.advantages, row)
    square = _velocity_error(velocity.detach(), noised)
    if row.clip_range is None:
        return VelocityTerms(advantages * error, (square, torch.zeros_like(square)))
    ratio = importance_ratio(_signed_error(old, noised, row) - error)
    gain = ratio * advantages
    bounded = ratio.clamp(1 - row.clip_range, 1 + row.clip_range) * advantages
    return VelocityTerms(-torch.minimum(gain, bounded), (square, (bounded < gain).to(square)))


def mean_square(values: Float[Tensor, "rows ..."]) -> Float[Tensor, " rows"]:
    """Return the mean square of each row's values."""
    return values.square().flatten(1).mean(1)


def _bounded(advantages: Float[Tensor, " rows"], row: SignedRow) -> Float[Tensor, " rows"]:
    if row.bound is None:
        return row.scale * advantages
    bounded = row.bound * (advantages / row.bound).tanh() if row.soft else advantages.clamp(-row.bound, row.bound)
    return row.scale * bounded


def _signed_error(velocity: Float[Tensor, "rows ..."], noised: NoisedImages, row: SignedRow) -> Float[Tensor, " rows"]:
    weights: Tensor = noised.sigmas**row.level_power
    power = row.error_power
    if power is None:
        return weights * _error_over_size(velocity, noised)
    powers: Tensor = (_velocity_error(velocity, noised) + ROUNDED_OFF) ** power - ROUNDED_OFF**power
    return weights / power * powers


def _velocity_error(velocity: Float[Tensor, "rows ..."], noised: NoisedImages) -> Float[Tensor, " rows"]:
    """Return the mean square of velocity - (noise - image)."""
    return mean_square(_image_error(velocity, noised)) / noised.sigmas.square()


def _error_over_size(velocity: Float[Tensor, "rows ..."], noised: NoisedImages) -> Float[Tensor, " rows"]:
    """Return the mean squared error of the image that a velocity leads to, over its mean absolute error."""
    error = _image_error(velocity, noised)
    # A constant: levels with much noise, where the errors are large, then weigh no more than the others.
    size = error.detach().abs().flatten(1).mean(1).clamp(min=SMALLEST_ERROR)
    return mean_square(error) / size


def _image_error(velocity: Float[Tensor, "rows ..."], noised: NoisedImages) -> Float[Tensor, "rows ..."]:
    """Return sigma (noise - image - velocity), what an image is off by that a velocity leads to."""
    sigmas = noised.sigmas.view(-1, *(1,) * (velocity.ndim - 1))
    return noised.noised - sigmas * velocity - noised.images
