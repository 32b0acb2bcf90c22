"""How images are denoised, which steps are noisy while rollouts are sampled, and which schedulers are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from grpo_core.errors import InputError
from grpo_core.seeds import derive_seed

SdeType = Literal["flow_grpo", "dance_grpo", "cps"]
SdeWindow = Literal["first", "random", "sliding"]
LogprobReduction = Literal["mean", "sum"]
Solver = Literal["euler", "lms"]


@dataclass(frozen=True, kw_only=True)
class DenoisingSettings:
    """How images are denoised.

    Rollouts that train the denoising model have noise in a window of their steps and follow the deterministic ODE in
    all others; evaluation has no window (Flow-GRPO-Fast; MixGRPO, Li et al., 2025, arXiv:2507.21802).

    Attributes:
        num_inference_steps: denoising steps; of GLM-Image those of its decoder.
        guidance_scale: classifier-free, or embedded in a distilled model; of GLM-Image that of its decoder.
        solver: of steps without noise. euler: the pipeline's own; lms: the linear multistep of order 2, which also uses
            the velocity of the step before (diffusers' LMSDiscreteScheduler).
        sde_type: noise of a step. flow_grpo: noise_level sqrt(sigma / (1 - sigma)) (Liu et al., 2025,
            arXiv:2505.05470); dance_grpo: constant (Xue et al., 2025, arXiv:2505.07818); cps: keeps the schedule's
            total noise, so that images have no grain (Wang and Yu, 2025, arXiv:2509.05952).
        noise_level: scale of the noise.
        sde_window: where the window starts in sde_window_range. first: at its beginning; random: anywhere, drawn once
            per iteration; sliding: one step later every sde_window_every iterations.
        sde_window_size: noisy steps; 0 records the finished latents alone, for matching velocities.
        sde_window_range: steps that a window may cover, the end excluded; never the last step.
        sde_window_every: iterations between two shifts of a sliding window.
        branch: make the steps before the window once for all samples of a group that start from the same noise.
        logprob_reduction: the log-prob of a step is the mean over the values of its latents, as in every published
            method, or their sum, the true density, whose ratios leave any clip range at once.
    """

    num_inference_steps: PositiveInt
    guidance_scale: NonNegativeFloat
    # Runs without another solver keep their keys.
    solver: Annotated[Solver, Field(exclude_if="euler".__eq__)] = "euler"
    sde_type: SdeType = "flow_grpo"
    noise_level: NonNegativeFloat = 0.7
    sde_window: SdeWindow = "random"
    sde_window_size: NonNegativeInt = 2
    sde_window_range: tuple[NonNegativeInt, NonNegativeInt] = (0, 5)
    sde_window_every: PositiveInt = 1
    branch: bool = False
    logprob_reduction: LogprobReduction = "mean"

    def check_window(self) -> None:
        """Raise InputError for a window outside its range or over the last step, or a noise level without a density."""
        if self.sde_window_size == 0:
            return
        begin, end = self.sde_window_range
        last = self.num_inference_steps - 1
        if last < 1:
            hint = "The last step has no noise, so a noisy step needs at least 2 of them."
            raise InputError("rollout.num_inference_steps", self.num_inference_steps, hint)
        if end > last:
            hint = (
                f"The last of {self.num_inference_steps} steps has no noise and cannot be in a window; "
                f"end the range at {last} or earlier."
            )
            raise InputError("rollout.sde_window_range", [begin, end], hint)
        if end - begin < self.sde_window_size:
            hint = f"A window of {self.sde_window_size} steps does not fit; widen the range or shrink sde_window_size."
            raise InputError("rollout.sde_window_range", [begin, end], hint)
        if self.noise_level == 0:
            hint = (
                "Steps without noise have no log-prob, so nothing could be trained; give a level above 0, such as 0.7."
            )
            raise InputError("rollout.noise_level", self.noise_level, hint)
        if self.sde_type == "cps" and self.noise_level > 1:
            hint = "cps turns a share sin(noise_level pi / 2) of the noise into new noise; give a level up to 1."
            raise InputError("rollout.noise_level", self.noise_level, hint)

    @property
    def latest_start(self) -> int:
        """Index of the first noisy step of the latest window."""
        begin, end = self.sde_window_range
        return begin if self.sde_window == "first" else end - self.sde_window_size

    def window_start(self, iteration: int, seed: int) -> int:
        """Return the index of the first noisy step: one for all samples of an iteration, from 1, which are compared.

        An empty window is after the last step. InputError as `check_window`.
        """
        self.check_window()
        if self.sde_window_size == 0:
            return self.num_inference_steps
        begin, end = self.sde_window_range
        places = end - begin - self.sde_window_size + 1
        if self.sde_window == "random":
            return begin + derive_seed(seed, "window", iteration) % places
        shifts = (iteration - 1) // self.sde_window_every if self.sde_window == "sliding" else 0
        return begin + shifts % places


SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""The scheduler whose steps can be made noisy."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "stochastic_sampling": "adds noise of its own to every step",
        "invert_sigmas": "goes from images to noise",
    }
)
"""What a scheduler does with a setting switched on."""


def refuse_scheduler(model: str, name: object, config: Mapping[str, Any]) -> None:
    """Raise InputError for a scheduler, by its class and config, that is not flow matching's, or adds own noise."""
    if name != SCHEDULER:
        hint = f"It denoises with {name}; only the steps of {SCHEDULER} can be made noisy and scored."
        raise InputError("policy.model", model, hint)
    for setting, what in _REFUSED.items():
        if config.get(setting):
            hint = f"Its scheduler {what}; set {setting} to false in scheduler/scheduler_config.json."
            raise InputError("policy.model", model, hint)
