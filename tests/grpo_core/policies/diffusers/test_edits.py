"""Pipelines that edit images are sampled and scored with the source images of their prompts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from grpo_core.collect import join_groups
from grpo_core.errors import InputError
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.source_images import SOURCES
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import RolloutGroup
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    EDIT_PROMPTS,
    EDITS,
    NEED_SOURCES,
    SEVERAL,
    SavedFolder,
    SharedPolicy,
    edits,
    picture,
    request,
    sampled,
    settings,
    source,
)

pytestmark = pytest.mark.usefixtures("small_sources")


def steps_of(groups: list[RolloutGroup]) -> tuple[DenoisingBatch, Tensor]:
    rows = join_groups(groups, torch.zeros(len(groups), len(groups[0].outputs)), "denoising")
    assert isinstance(rows.actions, DenoisingBatch)
    return rows.actions, rows.rollout_logprobs


# The others differ from this one by their encoders and latents alone.
BY_NAME = [pytest.param(name, marks=() if name == "flux2_klein" else pytest.mark.slow) for name in EDITS]


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


def test_marks_of_images_are_not_part_of_the_text(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux_kontext")
    plain, marked = (request(text, 1, sources=(source(),)) for text in ("make it red", "<image> make it red"))
    (one,), (other,) = sampled(policy, plain), sampled(policy, marked)
    assert one.outputs[0] == other.outputs[0]


# --- gradients


# --- bad input


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


def test_a_pipeline_with_a_mask_is_refused(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_folder("flux_kontext"), tmp_path / "masked"))
    index = folder / "model_index.json"
    for name, argument in (("FluxKontextInpaintPipeline", "mask_image"), ("BriaFiboEditPipeline", "mask")):
        index.write_text(index.read_text().replace("FluxKontextPipeline", name))
        with pytest.raises(InputError, match=f"source images: its call takes {argument}") as refused:
            FAMILY.refuse_unusable(str(folder), settings("flux_kontext"))
        assert refused.value.place == "policy.model"
        index.write_text(index.read_text().replace(name, "FluxKontextPipeline"))


def test_a_source_that_cannot_be_decoded_is_named(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux_kontext")
    broken = SourceImage.of(source().content[:60])
    with pytest.raises(InputError, match="cannot be decoded") as refused:
        sampled(policy, request(sources=(broken,)))
    assert broken.digest[:16] in str(refused.value.place)


def test_sources_above_the_image_s_size_are_scaled_down_for_kontext_alone() -> None:
    large = SourceImage.of(encode_png(picture(128, 64, 0)))
    size = ImageSize(32, 64)
    kontext = SOURCES["FluxKontextPipeline"].argument((large,), size)
    # 2048 pixels at 2:1 are 64 x 32.
    assert kontext.size == (64, 32)
    (reference,) = SOURCES["Flux2Pipeline"].argument((large,), size)
    assert reference.size == (128, 64)
    assert SOURCES["FluxKontextPipeline"].argument((large,), ImageSize(128, 128)).size == (128, 64)


def test_the_estimate_counts_a_source_where_there_usually_is_one(saved_folder: SavedFolder) -> None:
    def positions(name: str) -> int:
        chosen, choice = settings(name), {"denoising": TrainingChoice(LoraSettings(rank=2))}
        return FAMILY.sizes(str(saved_folder(name)), chosen, choice, ()).components["denoising"].positions

    # 32 pixels in units of 4, for the image and its source, and the prompt.
    assert positions("flux_kontext") == 64 + 64 + 64
    assert positions("flux2_klein") == 64 + 64
    assert positions("qwen_image_edit") == 64 + 1024 * 1024 // 16 + 512
