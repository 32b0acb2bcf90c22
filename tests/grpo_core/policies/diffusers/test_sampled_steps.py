"""Steps that are made once for siblings, or by another solver, for each class of pipelines."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_core.rollouts.records import RolloutGroup
from tests.grpo_core.policies.diffusers.test_policy import PROMPTS, scored
from tests.grpo_core.policies.diffusers.test_policy import pytestmark as warnings_of_classes
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    EDITS,
    MAKE,
    SavedFolder,
    edits,
    load,
    pixels,
    request,
    sampled,
    settings,
)

pytestmark = warnings_of_classes

QUICK = ("sd3", "flux", "flux_kontext")
CLASSES = [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in MAKE if each not in QUICK)]


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("name", CLASSES)
def test_branches_start_where_whole_rows_arrive(saved_folder: SavedFolder, name: str) -> None:
    """Within rounding: fewer rows a call add up in another order."""
    policy = load(saved_folder(name), settings(name))
    asked = edits(name, 2, window_start=2) if name in EDITS else [request(each, 2, window_start=2) for each in PROMPTS]
    asked = [replace(each, noise_seeds=(7, 7)) for each in asked]
    whole = sampled(policy, *asked)
    policy.sample_with(settings(name, branch=True))
    for group, branched in zip(whole, sampled(policy, *asked), strict=True):
        stored = branched.streams["denoising"].rollout_logprobs
        torch.testing.assert_close(stored, group.streams["denoising"].rollout_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(scored(policy, branched), stored, atol=1e-6, rtol=0)
        for image, other in zip(group.outputs, branched.outputs, strict=True):
            assert abs(pixels(image) - pixels(other)).max() <= 1


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("name", CLASSES)
def test_a_solver_makes_the_steps_without_noise(saved_folder: SavedFolder, name: str) -> None:
    """One image, whether its latents are kept or not, and another than Euler's; noisy steps are scored as before."""
    policy = load(saved_folder(name), settings(name))

    def drawn(window_start: int | None, **changes: Any) -> list[RolloutGroup]:
        policy.sample_with(settings(name, **changes))
        asked = edits(name, 2) if name in EDITS else [request(PROMPTS[0], 2)]
        return sampled(policy, *(replace(each, window_start=window_start) for each in asked))

    steps = policy.settings.num_inference_steps
    finished, kept = drawn(None, solver="lms"), drawn(steps, solver="lms", sde_window_size=0)
    for made, also, other in zip(finished, kept, drawn(None), strict=True):
        for image, stored, by_euler in zip(made.outputs, also.outputs, other.outputs, strict=True):
            assert abs(pixels(image) - pixels(stored)).max() <= 1
            assert abs(pixels(image) - pixels(by_euler)).max() > 0
    for group in drawn(2, solver="lms"):
        torch.testing.assert_close(
            scored(policy, group), group.streams["denoising"].rollout_logprobs, atol=1e-6, rtol=0
        )
