"""One noisy denoising step, and schedulers that a pipeline runs over while it samples and while steps are scored.

A flow-matching model predicts the velocity v of latents x = (1 - sigma) clean + sigma noise. Callers give fp32. A
pipeline keeps its own loop: guidance, packing, clocks and dtypes are the same on both sides, so on unchanged weights
the importance ratio is one for any pipeline that calls FlowMatchEulerDiscreteScheduler.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, assert_never

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchEulerDiscreteSchedulerOutput,
)
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.policies.denoising.settings import DenoisingSettings, LogprobReduction, SdeType
from grpo_core.seeds import make_generator
from grpo_core.transfers import to_device


class Transition(NamedTuple):
    """The Gaussian of the next latents: a mean for every value, one standard deviation; dt is sigma - next_sigma.

    `velocity` is the model's, from which the mean was computed.
    """

    mean: Float[Tensor, "rows ..."]
    std: Float[Tensor, ""]
    dt: Float[Tensor, ""]
    velocity: Float[Tensor, "rows ..."]

    @property
    def speed(self) -> Float[Tensor, " rows"]:
        """The root mean square of each row's velocity, a constant."""
        return self.velocity.detach().flatten(1).square().mean(1).sqrt()


class NoiseSchedule(NamedTuple):
    """Sigma before and after one step; the schedule's second one stands in for 1, where Flow-GRPO divides by 0."""

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
    """Return the Gaussian of the latents after one step at this velocity; noise level 0 is Euler's step."""
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
            return Transition((1 - next_sigma) * clean + kept * old_noise, std, dt, velocity)
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
    return Transition(latents - (velocity - eta.square() / 2 * score) * dt, eta * dt.sqrt(), dt, velocity)


def step_logprob(
    next_latents: Float[Tensor, "rows ..."], step: Transition, reduction: LogprobReduction
) -> Float[Tensor, " rows"]:
    """Return the log-density of each row's latents in nats, reduced over their values; the latents are constants."""
    deviation = (next_latents.detach() - step.mean) / step.std
    density = -deviation.square() / 2 - step.std.log() - math.log(2 * math.pi) / 2
    return _reduced(density, reduction)


def step_kl(mean: Float[Tensor, "rows ..."], other: Transition, reduction: LogprobReduction) -> Float[Tensor, " rows"]:
    """Return KL(policy || other) of one step in nats, reduced over the values like the log-prob.

    Both Gaussians have one standard deviation, so the KL is (mean - other's mean)^2 / (2 std^2), exactly. Flow-GRPO
    divides by 2 eta^2, without the step's length. The mean has a gradient, the other is a constant.
    """
    return _reduced((mean - other.mean.detach()).square() / (2 * other.std.square()), reduction)


def _reduced(values: Float[Tensor, "rows ..."], reduction: LogprobReduction) -> Float[Tensor, " rows"]:
    values = values.flatten(1)
    return values.mean(1) if reduction == "mean" else values.sum(1)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that states of a pipeline are stored in: fp32 as fp16, any other unchanged.

    fp16 rounds latents, which are below 10, eight times finer than bf16. Sampling continues from the rounded value.
    """
    return torch.float16 if dtype == torch.float32 else dtype


S = TypeVar("S", bound="WindowScheduler")


class WindowScheduler(FlowMatchEulerDiscreteScheduler):
    """The schedule of a pipeline's own scheduler, of which the pipeline sees the timesteps that are kept."""

    settings: DenoisingSettings
    timesteps: Tensor
    sigmas: Tensor
    kept = slice(None)

    @classmethod
    def like(cls: type[S], own: FlowMatchEulerDiscreteScheduler, settings: DenoisingSettings) -> S:
        """Return a scheduler with the configuration of a pipeline's own."""
        made: S = cls.from_config(own.config)
        made.set_shift(own.shift)
        made.settings = settings
        return made

    # Pipelines look for the names of arguments in this signature.
    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Make the whole schedule, and give the pipeline a part of its timesteps."""
        super().set_timesteps(num_inference_steps, None, sigmas, mu, timesteps)
        # Made where its numbers are: the host does not wait for a copy that it need not see arrive.
        made = [self.sigmas, self.timesteps[self.kept]]
        self.sigmas, self.timesteps = to_device(made, torch.device("cpu" if device is None else device))

    def scale_model_input(self, sample: Tensor, timestep: Tensor | None = None) -> Tensor:
        """Return the latents: a pipeline of several kinds of schedulers scales for all but its own classes."""
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Make one step; as FlowMatchEulerDiscreteScheduler, but latents never become narrower than they began."""
        # Its own step rounds to the dtype of the model's output. Where that is in 16 bits and the first latents are
        # not, a call that scores later steps would begin in another dtype than sampling had there.
        velocity = model_output.to(torch.promote_types(model_output.dtype, sample.dtype))
        following = self._following(velocity, timestep, sample, *args, **kwargs)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)

    def _following(self, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the latents after a step from these."""
        raise NotImplementedError

    def _transition(self, index: int, latents: Tensor, velocity: Tensor) -> Transition:
        settings, wide = self.settings, torch.promote_types(velocity.dtype, torch.float32)
        sigmas = (self.sigmas[index], self.sigmas[index + 1], self.sigmas[1])
        noise = NoiseSchedule(*(sigma.to(velocity.device, wide) for sigma in sigmas))
        return transition(settings.sde_type, settings.noise_level, noise, latents.to(wide), velocity.to(wide))


class OdeScheduler(WindowScheduler):
    """Steps of the ODE, by the solver of the settings; the first of a call is Euler's."""

    _before: Tensor | None = None

    def _following(self, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._ode_step(self._place(), velocity, timestep, latents, *args, **kwargs)

    def _place(self) -> int:
        """Return the index of the step to make among those of the whole schedule."""
        if self.step_index is None:
            # Its place among the timesteps would be read from the device, and the first one is the first.
            self._step_index = (self.begin_index or 0) + (self.kept.start or 0)
        index: int = self.step_index
        return index

    def _ode_step(
        self, index: int, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        moved = velocity
        if self.settings.solver == "lms":
            moved = velocity.to(torch.promote_types(velocity.dtype, torch.float32))
            before, self._before = self._before, moved
            if before is not None:
                last, now, after = self.sigmas[index - 1 : index + 2].unbind()
                moved = moved + (now - after) / (last - now) / 2 * (moved - before)
        own_step = FlowMatchEulerDiscreteScheduler.step
        following: Tensor = own_step(self, moved, timestep, latents, *args, return_dict=False, **kwargs)[0]
        return following.to(velocity.dtype)


class NoisyScheduler(OdeScheduler):
    """Steps of the ODE outside the window and noisy ones inside it, whose latents and log-probs are recorded.

    `states` are in the dtype they are stored in; of an empty window after the last step, the finished latents.
    """

    def begin(
        self, start: int, step_seeds: Sequence[int], sample_ids: Sequence[str], kept: slice = slice(None)
    ) -> "NoisyScheduler":
        """Prepare for one call of the pipeline, with the index of the window's first step and one seed per row.

        The call makes the steps that are kept, all of them or those before the window or from there on.
        """
        self.window, self.kept = range(start, start + self.settings.sde_window_size), kept
        assert not self.window or len(step_seeds) == len(sample_ids), "one seed per row"
        self.sample_ids = tuple(sample_ids)
        # One generator per row: a row's noise does not depend on the rows that are sampled with it.
        self.generators = [make_generator(seed) for seed in step_seeds]
        self.states: list[Tensor] = []
        self.logprobs: list[Float[Tensor, " rows"]] = []
        # Read after the last step: a GPU would run dry while the host waits after each.
        self._finite: dict[int, Bool[Tensor, " rows"]] = {}
        self._is_rounded: Bool[Tensor, ""] | None = None
        return self

    def _following(self, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        index = self._place()
        if index in self.window:
            following = self._noisy_step(index, velocity, latents)
            # The velocity before the noise says nothing of the one behind it.
            self._before = None
            self._step_index += 1
            return following
        following = self._ode_step(index, velocity, timestep, latents, *args, **kwargs)
        self._look_at(following, index)
        if index == self.window.start - 1:
            self.states.append(following.to(stored_dtype(following.dtype)))
            following = self.states[0].to(following.dtype)
        return following

    def _noisy_step(self, index: int, velocity: Tensor, latents: Tensor) -> Tensor:
        stored = stored_dtype(velocity.dtype)
        if not self.states:
            self.states.append(latents.to(stored))
        if not self.logprobs:
            self._is_rounded = (self.states[0].to(latents.dtype) == latents).all()
        moved = self._transition(index, latents, velocity)
        drawn = [torch.randn(moved.mean.shape[1:], generator=generator) for generator in self.generators]
        # The pipeline continues from the rounded latents, and it is these that are scored.
        noise = torch.stack(drawn).to(moved.mean, non_blocking=True)
        following = (moved.mean + moved.std * noise).to(stored)
        self._look_at(following, index)
        self.states.append(following)
        self.logprobs.append(step_logprob(following.to(moved.mean.dtype), moved, self.settings.logprob_reduction))
        return following.to(velocity.dtype)

    def _look_at(self, latents: Tensor, index: int) -> None:
        self._finite[index] = torch.isfinite(latents).flatten(1).all(1)

    def require_sound(self) -> None:
        """Read what was seen on the way: NonFiniteError names the samples and the first step of broken latents."""
        finite = dict(zip(self._finite, torch.stack([*self._finite.values()]).tolist(), strict=True))
        for index, rows in finite.items():
            if broken := [sample for sample, good in zip(self.sample_ids, rows, strict=True) if not good]:
                hint = (
                    f"Step {index + 1} of {self.num_inference_steps} gave them. The weights are damaged, or the "
                    "arithmetic overflows: use float32 or bfloat16."
                )
                raise NonFiniteError("latent", broken, hint)
        if self._is_rounded is not None and not self._is_rounded:
            raise RuntimeError("the latents before the window were not rounded to the dtype they are stored in")


class ReplayScheduler(WindowScheduler):
    """The window's steps alone, each answered with the stored latents, so that each step's graph is its own."""

    def begin(self, start: int, states: Float[Tensor, "states rows ..."]) -> "ReplayScheduler":
        """Prepare for one call of the pipeline, with the latents before and after the steps from `start` on."""
        self.window = range(start, start + len(states) - 1)
        self.kept = slice(self.window.start, self.window.stop)
        self.states = states
        self.transitions: list[Transition] = []
        return self

    def _following(self, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = len(self.transitions)
        self.transitions.append(self._transition(self.window[place], self.states[place], velocity))
        return self.states[place + 1].to(velocity.dtype)


class StartScheduler(WindowScheduler):
    """No step at all: the pipeline returns the latents that it would have started from, in its own form."""

    kept = slice(0)


class VelocityScheduler(WindowScheduler):
    """One timestep, whose model output is recorded as the pipeline gives it, guidance included; nothing is denoised."""

    velocity: Tensor

    def begin(self, index: int) -> "VelocityScheduler":
        """Prepare for one call of the pipeline at the timestep of a denoising step."""
        self.kept = slice(index, index + 1)
        return self

    def _following(self, velocity: Tensor, timestep: Tensor, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.velocity = velocity
        return latents


@contextmanager
def exchanged_scheduler(pipeline: Any, scheduler: WindowScheduler) -> Iterator[None]:
    """Let the pipeline use another scheduler inside the context."""
    own = pipeline.scheduler
    pipeline.scheduler = scheduler
    try:
        yield
    finally:
        pipeline.scheduler = own
