"""A noisy step against its papers, diffusers and torch.distributions."""

import math
from typing import NamedTuple

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from grpo_core.policies.denoising.scheduler import NoiseSchedule, step_kl, step_logprob, transition
from grpo_core.policies.denoising.settings import SdeType

KINDS: tuple[SdeType, ...] = ("flow_grpo", "dance_grpo", "cps")


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 4, 6, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noise(sigma: float, after: float, second: float = 0.9, dtype: torch.dtype = torch.float64) -> NoiseSchedule:
    return NoiseSchedule(*(torch.tensor(each, dtype=dtype) for each in (sigma, after, second)))


class Gaussian(NamedTuple):
    mean: Tensor
    std: Tensor


def flow_grpo_formula(x: Tensor, v: Tensor, sigma: float, after: float, second: float, level: float) -> Gaussian:
    """sd3_sde_with_logprob.py, value by value in Python's floats."""
    dt = after - sigma
    deviation = math.sqrt(sigma / (1 - (second if sigma == 1 else sigma))) * level
    from_x = 1 + deviation**2 / (2 * sigma) * dt
    from_v = (1 + deviation**2 * (1 - sigma) / (2 * sigma)) * dt
    return Gaussian(x * from_x + v * from_v, torch.tensor(deviation * math.sqrt(-dt), dtype=x.dtype))


def dance_grpo_formula(x: Tensor, v: Tensor, sigma: float, after: float, second: float, level: float) -> Gaussian:
    """flux_step: Euler's step and a correction by the score of the predicted clean latents."""
    step = after - sigma
    clean = x - sigma * v
    score = -(x - clean * (1 - sigma)) / sigma**2
    return Gaussian(
        x + step * v - 0.5 * level**2 * score * step, torch.tensor(level * math.sqrt(sigma - after), dtype=x.dtype)
    )


def cps_formula(x: Tensor, v: Tensor, sigma: float, after: float, second: float, level: float) -> Gaussian:
    std = after * math.sin(level * math.pi / 2)
    clean, old_noise = x - sigma * v, x + v * (1 - sigma)
    return Gaussian(clean * (1 - after) + old_noise * math.sqrt(after**2 - std**2), torch.tensor(std, dtype=x.dtype))


FORMULAS = {"flow_grpo": flow_grpo_formula, "dance_grpo": dance_grpo_formula, "cps": cps_formula}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.9), (0.9, 0.75), (0.31, 0.2), (0.05, 0.01)])
def test_mean_and_std_are_those_of_the_paper(kind: SdeType, sigma: float, after: float) -> None:
    x, v = drawn(0), drawn(1)
    found = transition(kind, 0.7, noise(sigma, after), x, v)
    expected = FORMULAS[kind](x, v, sigma, after, 0.9, 0.7)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-13, atol=1e-13)
    assert float(found.std) == pytest.approx(float(expected.std), rel=1e-13)
    assert float(found.dt) == pytest.approx(sigma - after, rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_differs_from_fp64_by_rounding_alone(kind: SdeType) -> None:
    x, v = drawn(0), drawn(1)
    exact = transition(kind, 0.7, noise(1.0, 0.9), x, v)
    narrow = transition(kind, 0.7, noise(1.0, 0.9, dtype=torch.float32), x.float(), v.float())
    assert narrow.mean.dtype == torch.float32
    torch.testing.assert_close(narrow.mean.double(), exact.mean, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_a_step_is_that_of_diffusers(kind: SdeType) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    x = drawn(0, torch.float32)
    for index, timestep in enumerate(scheduler.timesteps):
        v = drawn(10 + index, torch.float32)
        sigmas = NoiseSchedule(scheduler.sigmas[index], scheduler.sigmas[index + 1], scheduler.sigmas[1])
        found = transition(kind, 0.0, sigmas, x, v)
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        torch.testing.assert_close(found.mean, x, rtol=0, atol=2e-6)
        assert float(found.std) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_and_the_last_noisy_step_of_a_schedule_have_a_density(kind: SdeType) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(10)
    assert float(scheduler.sigmas[0]) == 1
    for index in (0, 8):
        sigmas = NoiseSchedule(scheduler.sigmas[index], scheduler.sigmas[index + 1], scheduler.sigmas[1])
        found = transition(kind, 0.7, sigmas, drawn(0, torch.float32), drawn(1, torch.float32))
        assert 5e-4 < float(found.std) < 1.5
        assert torch.isfinite(found.mean).all()
        assert torch.isfinite(step_logprob(found.mean, found, "mean")).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_model_keeps_the_noise_of_the_schedule(kind: SdeType) -> None:
    """With clean latents of 0 the velocity is the noise: a variance of sigma^2 becomes about next_sigma^2."""
    eps = torch.randn(200_000, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sigma, after = 0.5, 0.499
    moved = transition(kind, 0.7, noise(sigma, after), sigma * eps, eps)
    variance = float(moved.mean.var() / eps.var() + moved.std.square())
    assert variance == pytest.approx(after**2, rel=1e-12 if kind == "cps" else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_torch(kind: SdeType) -> None:
    step = transition(kind, 0.7, noise(0.9, 0.75), drawn(0), drawn(1))
    following = step.mean + step.std * drawn(2)
    values = following[0].numel()
    density = Independent(Normal(step.mean, step.std), 3).log_prob(following)
    torch.testing.assert_close(step_logprob(following, step, "sum"), density, rtol=1e-12, atol=0)
    torch.testing.assert_close(step_logprob(following, step, "mean"), density / values, rtol=1e-12, atol=0)


def test_the_exact_kl_is_that_of_torch() -> None:
    step = transition("flow_grpo", 0.7, noise(0.9, 0.75), drawn(0), drawn(1))
    reference = transition("flow_grpo", 0.7, noise(0.9, 0.75), drawn(0), drawn(2))
    kl = kl_divergence(*(Independent(Normal(each.mean, each.std), 3) for each in (step, reference)))
    found = step_kl(step.mean, reference, "sum")
    torch.testing.assert_close(found, kl, rtol=1e-12, atol=0)
    torch.testing.assert_close(step_kl(step.mean, reference, "mean"), kl / step.mean[0].numel(), rtol=1e-12, atol=0)


def test_the_gradient_of_a_log_prob_takes_the_latents_as_given() -> None:
    """Sampled latents contain the mean; were they not constants, the gradient would be zero."""
    v = drawn(1).requires_grad_()
    step = transition("flow_grpo", 0.7, noise(0.9, 0.75), drawn(0), v)
    following = step.mean + step.std * drawn(2)
    (gradient,) = torch.autograd.grad(step_logprob(following, step, "sum").sum(), v)
    # d log N / d mean = (x - mean) / std^2 = noise / std; d mean / d v is one number for the step.
    slope = (-0.15) * (1 + 0.49 * (0.9 / 0.1) * 0.1 / (2 * 0.9))
    torch.testing.assert_close(gradient, drawn(2) / float(step.std.detach()) * slope, rtol=1e-12, atol=1e-14)
