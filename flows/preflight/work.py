"""How much work a training is, in numbers that its configuration tells."""

import torch

from configs.rollouts import ImageRolloutSection
from configs.schema import RunConfig
from tasks.reports.text import counted


def describe_work(config: RunConfig) -> str:
    """Say what a training samples, and that a CPU is slow; evaluations are not counted."""
    rollout, each, iterations = config.rollout, config.samples_per_iteration, config.run.iterations
    if isinstance(rollout, ImageRolloutSection):
        sampled = (
            f"{each * iterations:,} images of {rollout.size}, each with {counted(rollout.num_inference_steps, 'step')}"
        )
    else:
        length = getattr(rollout, "max_completion_length", 0)
        sampled = f"{each * iterations:,} completions of at most {counted(length, 'token')}"
    work = f"{counted(iterations, 'iteration')} sample {sampled}, and train on them"
    if torch.cuda.is_available() and "cpu" not in config.placement.devices:
        return work
    return (
        f"{work}; without a GPU all but the tiny models are slow, and a run says after two iterations how much is left"
    )
