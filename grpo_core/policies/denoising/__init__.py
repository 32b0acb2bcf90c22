"""Denoising as actions: noisy steps of any pipeline with a flow-matching Euler scheduler, recorded and scored again.

settings    number of steps, guidance, kind of noise and the window of noisy steps; imports no torch
kernels     mean and std of one noisy step, its log-prob, and the exact KL between two steps
scheduler   schedulers that a pipeline runs over while it samples, and while its stored steps are scored
component   the denoising model of any such pipeline as a component of a policy
saved_scheduler which schedulers are refused, by their configuration; imports no torch
sample_rows from groups to the rows of the pipeline's calls, and back
images      from the levels that a pipeline returns to images
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.policies.denoising.component import DenoisingComponent
    from grpo_core.policies.denoising.images import image_of
    from grpo_core.policies.denoising.kernels import (
        NoiseSchedule,
        Transition,
        step_kl,
        step_logprob,
        transition,
    )
    from grpo_core.policies.denoising.sample_rows import DenoisedGroup
    from grpo_core.policies.denoising.scheduler import (
        NoisyScheduler,
        ReplayScheduler,
        StartScheduler,
        VelocityScheduler,
        WindowScheduler,
        exchanged_scheduler,
        stored_dtype,
    )
    from grpo_core.policies.denoising.settings import DenoisingSettings, LogprobReduction, SdeType, SdeWindow

__all__ = [
    "DenoisedGroup",
    "DenoisingComponent",
    "DenoisingSettings",
    "LogprobReduction",
    "NoiseSchedule",
    "NoisyScheduler",
    "ReplayScheduler",
    "SdeType",
    "SdeWindow",
    "StartScheduler",
    "Transition",
    "VelocityScheduler",
    "WindowScheduler",
    "exchanged_scheduler",
    "image_of",
    "step_kl",
    "step_logprob",
    "stored_dtype",
    "transition",
]

__getattr__ = import_on_use(__name__, __file__)
