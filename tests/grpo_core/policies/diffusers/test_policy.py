"""Pipelines are sampled, scored and trained, and draw what diffusers draws."""

from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import nn

from grpo_core.collect import join_groups
from grpo_core.errors import InputError
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import make_generator
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import GUIDANCE
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    EDITS,
    FAMILIES,
    SEVERAL,
    SavedFolder,
    SharedPolicy,
    edits,
    load,
    pixels,
    request,
    sampled,
    scaled,
    settings,
)

# Ernie's pipeline gives its scheduler a tensor of sigmas.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PROMPTS = ("a red dot", "a blue ring next to a much larger green square")


def scored(policy: DiffusersPolicy, group: RolloutGroup) -> torch.Tensor:
    actions = group.streams["denoising"].actions
    assert isinstance(actions, DenoisingBatch)
    return policy.denoising.logprobs(actions).logprobs.detach()


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_a_sample_does_not_depend_on_other_rows(shared_policy: SharedPolicy, name: str) -> None:
    policy = shared_policy(name)
    (together,) = sampled(policy, request())
    _, second = sampled(policy, request("green ring", seed=9), request())
    policy.sample_with(settings(name, decode_batch_size=1))
    (apart,) = sampled(policy, request())
    # Matrix products of another shape round differently: by up to 2e-6 of the log-prob here.
    torch.testing.assert_close(
        together.streams["denoising"].rollout_logprobs,
        apart.streams["denoising"].rollout_logprobs,
        atol=1e-5,
        rtol=0,
    )
    for image, other in zip(together.outputs, apart.outputs, strict=True):
        assert abs(pixels(image) - pixels(other)).max() <= 1
    for image, other in zip(together.outputs, second.outputs, strict=True):
        assert abs(pixels(image) - pixels(other)).max() <= 1


def gain(policy: DiffusersPolicy, groups: list[RolloutGroup]) -> torch.Tensor:
    """How an update that prefers the first sample of two moves the log-probs of the last group."""
    before = scored(policy, groups[-1])
    optimizer = PolicyOptimizer(policy.denoising.trainable_parameters(), OptimizerSettings(learning_rate=1e-3))
    rows = join_groups(groups, torch.tensor([[1.0, -1.0]] * len(groups)), "denoising")
    update_policy(policy.denoising, optimizer, rows, UpdateSettings(loss="grpo", micro_batch_size=2), seed=0)
    return scored(policy, groups[-1]) - before


# Every class that is tried has the trial of tests/grpo_core/policies/test_trial.
@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_a_class_is_sampled_scored_and_trained(saved_folder: SavedFolder, name: str) -> None:
    policy = load(saved_folder(name), settings(name))
    for window_start in (2, 0):
        groups = sampled(policy, *(request(prompt, 2, window_start=window_start) for prompt in PROMPTS))
        for group in groups:
            assert {pixels(image).shape for image in group.outputs} == {(*policy.settings.size, 3)}
            stored = group.streams["denoising"].rollout_logprobs
            assert stored.std() > 1e-3
            torch.testing.assert_close(scored(policy, group), stored, atol=1e-6, rtol=0)
    assert gain(policy, groups).abs().max() > 1e-6


# The arguments that a user has to give so that the image is made of what was given; the others need none.
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "qwen_image": {"true_cfg_scale": 4.0, "negative_prompt": " "},
    "qwen_image_edit": {"true_cfg_scale": 4.0, "negative_prompt": " "},
    "qwen_image_edit_plus": {"true_cfg_scale": 4.0, "negative_prompt": " "},
    "flux_kontext": {"max_area": 32 * 32, "_auto_resize": False, "guidance_scale": 4.0},
    "ernie_image": {"use_pe": False, "guidance_scale": 4.0},
}
QUICK_EDITS = ("flux_kontext", "flux2_klein")
SLOW_EDITS = [pytest.param(name, marks=pytest.mark.slow) for name in EDITS if name not in QUICK_EDITS]


def own_images(own: Any, name: str, asked: GroupRequest) -> list[Any]:
    """What diffusers draws for a request of its user."""
    arguments = OWN_ARGUMENTS.get(name, {"guidance_scale": GUIDANCE.get(name, 4.0)})
    if asked.sources:
        images = [each.open() for each in asked.sources]
        if name == "flux_kontext":
            images = [each.resize(scaled(each.size), Image.Resampling.LANCZOS) for each in images]
        arguments = {**arguments, "image": images if name in SEVERAL else images[0]}
    if (length := settings(name).max_sequence_length) is not None:
        arguments = {**arguments, "max_sequence_length": length}
    found: list[Any] = own(
        prompt=asked.prompt,
        height=32,
        width=32,
        num_inference_steps=5,
        num_images_per_prompt=len(asked.noise_seeds),
        generator=[make_generator(seed) for seed in asked.noise_seeds],
        **arguments,
    ).images
    return found


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("name", [*FAMILIES, "ernie_image", *QUICK_EDITS, *SLOW_EDITS])
def test_without_a_window_images_are_the_pipeline_s_own(saved_folder: SavedFolder, name: str) -> None:
    folder, choice = str(saved_folder(name)), {"denoising": TrainingChoice(LoraSettings(rank=2))}
    policy = DiffusersPolicy.load(folder, settings(name), choice)
    asked = edits(name, 2, window_start=None) if name in EDITS else [request(samples=3, window_start=None)]
    own = diffusers.DiffusionPipeline.from_pretrained(folder)
    own.set_progress_bar_config(disable=True)
    # On some CPUs torch rounds otherwise where weights could have gradients, even while none are recorded.
    for part in own.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    if name == "z_image_omni":
        # It encodes sources in bfloat16, and the weights are in fp32.
        encode = own.vae.encode
        own.vae.encode = lambda pixels: encode(pixels.float())
    for group in sampled(policy, *asked):
        assert group.streams == {}
        for image, expected in zip(group.outputs, own_images(own, name, group.request), strict=True):
            assert abs(pixels(image) - pixels(expected)).max() <= (0 if name in FAMILIES else 1)


def test_latents_of_flux2_are_the_pipeline_s_own(saved_folder: SavedFolder) -> None:
    """Height and width differ, so that a swap of them would show."""
    name = "flux2_klein"
    policy = load(saved_folder(name), settings(name, height=32, width=16), disturbed=False)
    (group,) = sampled(policy, request(samples=1, window_start=None))
    policy.sample_with(settings(name, height=32, width=16, noise_level=1e-6))
    (almost_ode,) = sampled(policy, request(samples=1, window_start=0))
    assert pixels(group.outputs[0]).shape == (32, 16, 3)
    assert abs(pixels(group.outputs[0]) - pixels(almost_ode.outputs[0])).max() <= 1


def test_the_size_of_a_request_counts(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("qwen_image")
    (group,) = sampled(policy, request(size=ImageSize(48, 16), samples=2))
    assert [image.size for image in group.outputs if isinstance(image, Image.Image)] == [(48, 16)] * 2
    torch.testing.assert_close(scored(policy, group), group.streams["denoising"].rollout_logprobs, atol=1e-6, rtol=0)


def test_a_size_that_the_pipeline_rounds_is_refused(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux")
    with pytest.raises(InputError, match="32x32") as sampling:
        sampled(policy, request(size=ImageSize(34, 34)))
    with pytest.raises(InputError, match="32x32") as choosing:
        policy.sample_with(settings("flux", height=34, width=34))
    for refused in (sampling.value, choosing.value):
        assert (refused.place, refused.value) == ("rollout.width and height", "34x34")
