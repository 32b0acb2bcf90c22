"""One noisy denoising step: the Gaussian that it draws from, log-probs under it, and the KL between two of them.

A flow-matching model predicts the velocity v of latents x = (1 - sigma) clean + sigma noise. All functions compute in
the dtype of their inputs; callers give fp32.
"""

import math
from typing import NamedTuple, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.policies.denoising.settings import LogprobReduction, SdeType


class Transition(NamedTuple):
    """The Gaussian of the next latents: independent values of one standard deviation.

    Attributes:
        mean: of every value of the latents.
        std: one number for the step.
        dt: length of the step, sigma - next_sigma.
    """

    mean: Float[Tensor, "rows ..."]
    std: Float[Tensor, ""]
    dt: Float[Tensor, ""]


class NoiseSchedule(NamedTuple):
    """The noise of one step.

    Attributes:
        sigma: before the step.
        next_sigma: after it; smaller.
        second_sigma: of the whole schedule; stands in for a sigma of 1, where flow_grpo would divide by 0.
    """

    sigma: Float[Tensor, ""]
    next_sigma: Float[Tensor, ""]
    second_sigma: Float[Tensor, ""]


def transition(
    sde_type: SdeType,
    noise_level: float,
    noise: NoiseSchedule,
    latents: Float[Tensor, "rows ..."],
    velocity: Float[Tensor, "rows ..."],
) -> Transition:
    """Return mean and standard deviation of the latents after one step; noise level 0 is Euler's step of the ODE.

    Args:
        noise_level: as in DenoisingSettings.
        noise: sigmas of the step, 0-dimensional.
        latents: before the step.
        velocity: that the model predicts there, after guidance.
    """
    sigma, next_sigma, second_sigma = noise
    dt = sigma - next_sigma
    match sde_type:
        case "flow_grpo":
            # Flow-GRPO (arXiv:2505.05470), eq. 9.
            capped = torch.where(sigma == 1, second_sigma, sigma)
            return _diffused(noise_level * (sigma / (1 - capped)).sqrt(), sigma, dt, latents, velocity)
        case "dance_grpo":
            return _diffused(torch.full_like(sigma, noise_level), sigma, dt, latents, velocity)
        case "cps":
            # FlowCPS (arXiv:2509.05952): old and new noise together have the variance next_sigma^2.
            std = next_sigma * math.sin(noise_level * math.pi / 2)
            clean, old_noise = latents - sigma * velocity, latents + (1 - sigma) * velocity
            kept = next_sigma * math.cos(noise_level * math.pi / 2)
            return Transition((1 - next_sigma) * clean + kept * old_noise, std, dt)
        case _:
            assert_never(sde_type)


def _diffused(
    eta: Float[Tensor, ""],
    sigma: Float[Tensor, ""],
    dt: Float[Tensor, ""],
    latents: Float[Tensor, "rows ..."],
    velocity: Float[Tensor, "rows ..."],
) -> Transition:
    """Add the diffusion eta and the drift that keeps the marginals of the ODE: -eta^2 / 2 times the score."""
    score = -(latents + (1 - sigma) * velocity) / sigma
    return Transition(latents - (velocity - eta.square() / 2 * score) * dt, eta * dt.sqrt(), dt)


def step_logprob(
    next_latents: Float[Tensor, "rows ..."], step: Transition, reduction: LogprobReduction
) -> Float[Tensor, " rows"]:
    """Return the log-density of each row's latents in nats, reduced over their values; the latents are constants."""
    deviation = (next_latents.detach() - step.mean) / step.std
    density = -deviation.square() / 2 - step.std.log() - math.log(2 * math.pi) / 2
    return _reduced(density, reduction)


def step_kl(mean: Float[Tensor, "rows ..."], other: Transition, reduction: LogprobReduction) -> Float[Tensor, " rows"]:
    """Return KL(policy || other) of one step in nats, reduced over the values like the log-prob.

    Both Gaussians have one standard deviation, so the KL is exact: (mean - other's mean)^2 / (2 std^2), which is never
    negative and needs no sample. Flow-GRPO divides by 2 eta^2, without the step's length.

    Args:
        mean: of the policy, with gradient.
        other: reference, or the policy before the update; a constant.
    """
    return _reduced((mean - other.mean.detach()).square() / (2 * other.std.square()), reduction)


def _reduced(values: Float[Tensor, "rows ..."], reduction: LogprobReduction) -> Float[Tensor, " rows"]:
    values = values.flatten(1)
    return values.mean(1) if reduction == "mean" else values.sum(1)
