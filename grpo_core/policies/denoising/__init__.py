"""Denoising as actions: noisy steps of any pipeline with a flow-matching Euler scheduler, recorded and scored again.

settings    number of steps, guidance, kind of noise and the window of noisy steps; imports no torch
kernels     mean and std of one noisy step, its log-prob, and the exact KL between two steps
scheduler   schedulers that a pipeline runs over while it samples, and while its stored steps are scored
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.policies.denoising.kernels import NoiseSchedule, Transition, step_kl, step_logprob, transition
    from grpo_core.policies.denoising.scheduler import (
        NoisyScheduler,
        ReplayScheduler,
        StartScheduler,
        exchanged_scheduler,
        stored_dtype,
    )
    from grpo_core.policies.denoising.settings import DenoisingSettings, LogprobReduction, SdeType, SdeWindow

__all__ = [
    "DenoisingSettings",
    "LogprobReduction",
    "NoiseSchedule",
    "NoisyScheduler",
    "ReplayScheduler",
    "SdeType",
    "SdeWindow",
    "StartScheduler",
    "Transition",
    "exchanged_scheduler",
    "step_kl",
    "step_logprob",
    "stored_dtype",
    "transition",
]

__getattr__ = import_on_use(__name__, __file__)
