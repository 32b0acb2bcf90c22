"""A noisy step against its papers, diffusers and torch.distributions, and which steps of an iteration are noisy."""

import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LMSDiscreteScheduler
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from grpo_core.errors import InputError, NonFiniteError
from grpo_core.policies.denoising.scheduler import (
    NoiseSchedule,
    NoisyScheduler,
    OdeScheduler,
    step_kl,
    step_logprob,
    transition,
)
from grpo_core.policies.denoising.settings import DenoisingSettings, SdeType, Solver
from grpo_core.settings import check_fields

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


def made(**changes: object) -> DenoisingSettings:
    return DenoisingSettings(**{"num_inference_steps": 10, "guidance_scale": 1.0, **changes})


def starts(settings: DenoisingSettings, iterations: int, seed: int = 0) -> list[int]:
    return [settings.window_start(iteration, seed) for iteration in range(1, iterations + 1)]


def test_the_first_window_never_moves() -> None:
    assert starts(made(sde_window="first", sde_window_range=(1, 9)), 5) == [1] * 5


def test_a_sliding_window_moves_by_one_step_and_starts_over() -> None:
    settings = made(sde_window="sliding", sde_window_range=(1, 6), sde_window_size=2, sde_window_every=2)
    assert starts(settings, 10) == [1, 1, 2, 2, 3, 3, 4, 4, 1, 1]


def test_a_random_window_covers_its_range_evenly_and_repeats_with_its_seed() -> None:
    settings = made(sde_window="random", sde_window_range=(1, 6), sde_window_size=3)
    drawn = starts(settings, 600)
    assert set(drawn) == {1, 2, 3}
    assert all(150 < count < 250 for count in Counter(drawn).values())
    assert drawn == starts(settings, 600)
    assert drawn != starts(settings, 600, seed=1)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"sde_window_range": (0, 10)}, "rollout.sde_window_range"),
        ({"sde_window_range": (3, 3)}, "rollout.sde_window_range"),
        ({"sde_window_range": (4, 2)}, "rollout.sde_window_range"),
        ({"sde_window_size": 6}, "rollout.sde_window_range"),
        ({"num_inference_steps": 1}, "rollout.num_inference_steps"),
        ({"num_inference_steps": 5}, "rollout.sde_window_range"),
        ({"noise_level": 0.0}, "rollout.noise_level"),
        ({"sde_type": "cps", "noise_level": 1.1}, "rollout.noise_level"),
    ],
)
def test_a_window_without_density_is_refused(changes: dict[str, object], place: str) -> None:
    with pytest.raises(InputError) as refused:
        made(**changes).check_window()
    assert refused.value.place == place


def test_the_largest_window_leaves_the_last_step_alone() -> None:
    made(sde_window_range=(0, 9), sde_window_size=9).check_window()
    made(sde_type="cps", noise_level=1.0).check_window()


@pytest.mark.parametrize("changes", [{"sde_type": "ddim"}, {"noise_level": -0.1}, {"sde_window_size": -1}])
def test_values_outside_their_ranges_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        check_fields(made(**changes), "rollout")


def test_an_empty_window_is_after_the_last_step_and_needs_no_noise() -> None:
    settings = made(sde_window_size=0, sde_window_range=(0, 50), noise_level=0.0, sde_window="random")
    settings.check_window()
    assert set(starts(settings, 20)) == {settings.num_inference_steps}


def test_the_gradient_of_a_log_prob_takes_the_latents_as_given() -> None:
    """Sampled latents contain the mean; were they not constants, the gradient would be zero."""
    v = drawn(1).requires_grad_()
    step = transition("flow_grpo", 0.7, noise(0.9, 0.75), drawn(0), v)
    (gradient,) = torch.autograd.grad(step_logprob(step.mean + step.std * drawn(2), step, "sum").sum(), v)
    # d log N / d mean = (x - mean) / std^2 = noise / std; d mean / d v is one number for the step.
    slope = (-0.15) * (1 + 0.49 * (0.9 / 0.1) * 0.1 / (2 * 0.9))
    torch.testing.assert_close(gradient, drawn(2) / float(step.std.detach()) * slope, rtol=1e-12, atol=1e-14)


def noisy(window: int, **changes: Any) -> DenoisingSettings:
    return DenoisingSettings(num_inference_steps=4, guidance_scale=1.0, sde_window_size=window, **changes)


@pytest.mark.parametrize("solver", ["euler", "lms"])
@pytest.mark.parametrize("start", [0, 1])
def test_the_host_reads_nothing_between_the_steps(start: int, solver: Solver) -> None:
    """On the meta device no value can be read."""
    scheduler = NoisyScheduler.like(FlowMatchEulerDiscreteScheduler(), noisy(2, solver=solver))
    scheduler.begin(start, [1, 2], ["a", "b"]).set_timesteps(4, device="meta")
    latents = torch.zeros(2, 4, 8, 8, device="meta")
    for timestep in scheduler.timesteps:
        latents = scheduler.step(latents, timestep, latents, return_dict=False)[0]
    assert len(scheduler.logprobs) == 2
    with pytest.raises(NotImplementedError, match="meta"):
        scheduler.require_sound()


@pytest.mark.parametrize("window", [0, 2])
def test_the_first_step_with_broken_latents_is_named(window: int) -> None:
    scheduler = NoisyScheduler.like(FlowMatchEulerDiscreteScheduler(), noisy(window))
    scheduler.begin(1, [1, 2], ["a", "b"]).set_timesteps(4)
    latents = torch.zeros(2, 4, 8, 8, dtype=torch.float16).float()
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = torch.zeros_like(latents)
        velocity[1, 0, 0, 0] = math.nan if index >= 2 else 0.0
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    with pytest.raises(NonFiniteError, match=r"Step 3 of 4") as caught:
        scheduler.require_sound()
    assert caught.value.sample_ids == ("b",)


OLDER_NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
"""Of diffusers' scheduler."""


def followed(scheduler: OdeScheduler, steps: int, start: Tensor) -> list[Tensor]:
    """The latents before and after each of so many steps, where the velocity depends on latents and time alone."""
    scheduler.set_timesteps(steps)
    found = [start]
    for timestep in scheduler.timesteps:
        found.append(scheduler.step(bent(found[-1], timestep / 1000), timestep, found[-1], return_dict=False)[0])
    return found


def bent(latents: Tensor, sigma: Tensor) -> Tensor:
    return latents.cos() + 3 * sigma**2


def multistep(start: Tensor, sigmas: Tensor) -> list[Tensor]:
    """The latents by diffusers' linear multistep of order 2: its derivative of "noise" is the velocity itself."""
    peer = LMSDiscreteScheduler(num_train_timesteps=1000, prediction_type="epsilon")
    peer.set_timesteps(len(sigmas) - 1)
    peer.sigmas, peer.is_scale_input_called, peer._step_index = sigmas, True, 0
    found = [start]
    for sigma in sigmas[:-1]:
        found.append(peer.step(bent(found[-1], sigma), 0.0, found[-1], order=2, return_dict=False)[0])
    return found


@OLDER_NUMPY
def test_the_multistep_solver_is_that_of_diffusers() -> None:
    scheduler = OdeScheduler.like(FlowMatchEulerDiscreteScheduler(shift=3.0), noisy(0, solver="lms"))
    found = followed(scheduler, 6, drawn(0, torch.float32))
    expected = multistep(drawn(0, torch.float32), scheduler.sigmas)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_the_error_of_the_multistep_solver_falls_with_the_square_of_the_steps() -> None:
    def error(solver: str, steps: int) -> float:
        made = OdeScheduler.like(FlowMatchEulerDiscreteScheduler(), noisy(0, solver=solver))
        return float((followed(made, steps, start)[-1] - exact).abs().mean())

    start = drawn(0, torch.float64)
    fine = OdeScheduler.like(FlowMatchEulerDiscreteScheduler(), noisy(0, solver="lms"))
    exact = followed(fine, 512, start)[-1]
    assert error("euler", 16) / error("euler", 32) == pytest.approx(2, rel=0.1)
    assert error("lms", 16) / error("lms", 32) == pytest.approx(4, rel=0.15)


@OLDER_NUMPY
@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_multistep_solver_starts_anew_behind_noise(start: int) -> None:
    scheduler = NoisyScheduler.like(FlowMatchEulerDiscreteScheduler(shift=3.0), noisy(2, solver="lms"))
    latents = drawn(0, torch.float32).half().float()
    found = followed(scheduler.begin(start, [1, 2, 3], ["a", "b", "c"]), 6, latents)
    behind = start + 2
    before = multistep(latents, scheduler.sigmas[: start + 1])
    # fp16, in which the latents before the first noisy step are stored.
    torch.testing.assert_close(found[: start + 1], before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[behind:], multistep(found[behind], scheduler.sigmas[behind:]), rtol=0, atol=2e-6)
