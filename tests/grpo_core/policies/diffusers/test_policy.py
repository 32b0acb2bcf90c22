"""Pipelines are sampled, scored and trained, and draw what diffusers draws, also from source images."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from grpo_core.collect import join_groups
from grpo_core.errors import InputError
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.source_images import SOURCES
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import make_generator
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import GUIDANCE
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    EDIT_PROMPTS,
    EDITS,
    FAMILIES,
    NEED_SOURCES,
    SEVERAL,
    SavedFolder,
    SharedPolicy,
    edits,
    load,
    picture,
    pixels,
    request,
    sampled,
    scaled,
    settings,
    source,
)

# Ernie's pipeline gives its scheduler a tensor of sigmas.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Chroma's transformer imports it from where it was.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
]
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


def steps_of(groups: list[RolloutGroup]) -> tuple[DenoisingBatch, Tensor]:
    rows = join_groups(groups, torch.zeros(len(groups), len(groups[0].outputs)), "denoising")
    assert isinstance(rows.actions, DenoisingBatch)
    return rows.actions, rows.rollout_logprobs


# The others differ from this one by their encoders and latents alone.
BY_NAME = [pytest.param(name, marks=() if name == "flux2_klein" else pytest.mark.slow) for name in EDITS]


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("name", BY_NAME)
def test_stored_log_probs_are_found_again_with_the_source_and_not_with_another(
    shared_policy: SharedPolicy, name: str
) -> None:
    # Three samples in calls of two and one, scored in calls of three.
    chosen = settings(name, decode_batch_size=2)
    policy = shared_policy(name)
    policy.sample_with(chosen)
    for window_start in (0, 1):
        requests = edits(name, window_start=window_start)
        groups = sampled(policy, *requests)
        for group in groups:
            assert [image.size for image in group.outputs if isinstance(image, Image.Image)] == [chosen.size] * 3
        actions, stored = steps_of(groups)
        assert actions.sources == tuple(each.sources for each in requests for _ in range(3))
        order = [4, 0, 5, 2, 1, 3]
        scored = policy.denoising.logprobs(actions.select(order)).logprobs.detach()
        torch.testing.assert_close(scored, stored[order], atol=1e-6, rtol=0)
    own = actions.sources
    assert own is not None
    other = tuple((source(seed=9), *each[1:]) for each in own)
    moved = policy.denoising.logprobs(replace(actions, sources=other)).logprobs.detach() - stored
    assert (moved.abs().amax(1) > 0).all()
    if name in SEVERAL:
        exchanged = (*own[:3], *(each[::-1] for each in own[3:]))
        moved = policy.denoising.logprobs(replace(actions, sources=exchanged)).logprobs.detach() - stored
        assert (moved[3:].abs().amax(1) > 0).all()


@pytest.mark.usefixtures("small_sources")
def test_marks_of_images_are_not_part_of_the_text(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux_kontext")
    plain, marked = (request(text, 1, sources=(source(),)) for text in ("make it red", "<image> make it red"))
    (one,), (other,) = sampled(policy, plain), sampled(policy, marked)
    assert one.outputs[0] == other.outputs[0]


# --- gradients


# --- bad input


@pytest.mark.usefixtures("small_sources")
def test_prompts_that_do_not_fit_the_class_are_refused(saved_folder: SavedFolder) -> None:
    sizes = [ImageSize(64, 64)]

    def refuse(name: str, *images: list[ImageSize]) -> None:
        prompts = ["make it red", "make it <image>blue"][: len(images)]
        FAMILY.refuse_prompts(str(saved_folder(name)), settings(name), prompts, images)

    for name in EDITS:
        refuse(name, sizes, sizes)
    for name in SEVERAL:
        refuse(name, sizes * 3, sizes)
    cases: list[tuple[str, list[ImageSize], str, str]] = [
        ("qwen_image_edit", [], "0 source images", "QwenImageEditPipeline edits an image"),
        ("qwen_image_edit_plus", [], "0 source images", "QwenImageEditPlusPipeline edits an image"),
        ("qwen_image_edit", sizes * 2, "2 source images", "takes 1 of them"),
        ("flux_kontext", sizes * 2, "2 source images", "takes 1 of them"),
        ("bria", sizes, "1 source images", "makes images from text alone"),
        ("flux2", [ImageSize(64, 63)], "source image of 64x63 pixels", "at least 64 pixels"),
        ("flux2", [ImageSize(64, 513)], "source image of 64x513 pixels", "at most 8 times"),
        ("flux_kontext", [ImageSize(3, 8)], "source image of 3x8 pixels", "at least 4 pixels"),
    ]
    for name, given, value, hint in cases:
        before = sizes if name != "bria" else []
        with pytest.raises(InputError, match=hint) as refused:
            refuse(name, before, given)
        assert (refused.value.place, refused.value.value) == ("prompt 2", value)
        assert "make it <image>blue" in refused.value.hint
    for name in NEED_SOURCES:
        with pytest.raises(InputError, match="edits an image"):
            FAMILY.refuse_prompts(str(saved_folder(name)), settings(name), EDIT_PROMPTS)


@pytest.mark.usefixtures("small_sources")
def test_a_pipeline_with_a_mask_is_refused(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_folder("flux_kontext"), tmp_path / "masked"))
    index = folder / "model_index.json"
    for name, argument in (("FluxKontextInpaintPipeline", "mask_image"), ("BriaFiboEditPipeline", "mask")):
        index.write_text(index.read_text().replace("FluxKontextPipeline", name))
        with pytest.raises(InputError, match=f"source images: its call takes {argument}") as refused:
            FAMILY.refuse_unusable(str(folder), settings("flux_kontext"))
        assert refused.value.place == "policy.model"
        index.write_text(index.read_text().replace(name, "FluxKontextPipeline"))


@pytest.mark.usefixtures("small_sources")
def test_a_source_that_cannot_be_decoded_is_named(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux_kontext")
    broken = SourceImage.of(source().content[:60])
    with pytest.raises(InputError, match="cannot be decoded") as refused:
        sampled(policy, request(sources=(broken,)))
    assert broken.digest[:16] in str(refused.value.place)


@pytest.mark.usefixtures("small_sources")
def test_sources_above_the_image_s_size_are_scaled_down_for_kontext_alone() -> None:
    large = SourceImage.of(encode_png(picture(128, 64, 0)))
    size = ImageSize(32, 64)
    kontext = SOURCES["FluxKontextPipeline"].argument((large,), size)
    # 2048 pixels at 2:1 are 64 x 32.
    assert kontext.size == (64, 32)
    (reference,) = SOURCES["Flux2Pipeline"].argument((large,), size)
    assert reference.size == (128, 64)
    assert SOURCES["FluxKontextPipeline"].argument((large,), ImageSize(128, 128)).size == (128, 64)


@pytest.mark.usefixtures("small_sources")
def test_the_estimate_counts_a_source_where_there_usually_is_one(saved_folder: SavedFolder) -> None:
    def positions(name: str) -> int:
        chosen, choice = settings(name), {"denoising": TrainingChoice(LoraSettings(rank=2))}
        return FAMILY.sizes(str(saved_folder(name)), chosen, choice, ()).components["denoising"].positions

    # 32 pixels in units of 4, for the image and its source, and the prompt.
    assert positions("flux_kontext") == 64 + 64 + 64
    assert positions("flux2_klein") == 64 + 64
    assert positions("qwen_image_edit") == 64 + 1024 * 1024 // 16 + 512
