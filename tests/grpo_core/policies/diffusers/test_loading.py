"""What of a pipeline is trained by default, and how a trained pipeline is written and loaded again."""

from pathlib import Path

import diffusers
import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.loading import default_targets
from tests.grpo_core.policies.diffusers.tiny_classes import FAMILIES, settings
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, SharedPolicy, load, pixels, request


def joint_blocks(image: str, text: str) -> set[str]:
    """Layers of blocks that attend over image and text together."""
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    return {
        *(f"transformer_blocks.attn.{each}" for each in attention),
        *(f"transformer_blocks.{each}.net.{layer}" for each in (image, text) for layer in ("0.proj", "2")),
    }


BLOCKS = {
    "sd3": joint_blocks("ff", "ff_context"),
    "flux": {
        *joint_blocks("ff", "ff_context"),
        *(f"single_transformer_blocks.attn.{each}" for each in ("to_q", "to_k", "to_v")),
        *(f"single_transformer_blocks.{each}" for each in ("proj_mlp", "proj_out")),
    },
    "qwen_image": joint_blocks("img_mlp", "txt_mlp"),
    "z_image": {
        f"{blocks}.{each}"
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for each in (
            *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
        )
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_on_attention_and_feed_forward_layers_and_trained(shared_policy: SharedPolicy, name: str) -> None:
    policy = shared_policy(name)
    names = policy.denoising.trainable_parameters()
    layers = {each.split("base_model.model.")[1].split(".lora_")[0] for each in names}
    parts = (layer.split(".") for layer in layers)
    assert {f"{blocks}.{'.'.join(rest)}" for blocks, _, *rest in parts} == BLOCKS[name]
    (group,) = policy.sample([request(samples=1)])
    scored = policy.denoising.logprobs(group.streams["denoising"].actions).logprobs.sum()
    gradients = torch.autograd.grad(scored, list(names.values()), allow_unused=True)
    without = {
        each.split("base_model.model.")[1].split(".lora_")[0]
        for each, gradient in zip(names, gradients, strict=True)
        if gradient is None or not gradient.any()
    }
    # What the last block makes of the prompt is not read.
    last = {each for each in without if "add_q" in each or "add_out" in each or "context" in each or "txt" in each}
    assert without == last


def test_a_transformer_with_names_of_its_own_asks_for_targets() -> None:
    with pytest.raises(InputError) as refused:
        default_targets(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert refused.value.place == "policy.lora.targets"


def test_attention_that_diffusers_lacks_is_refused(saved_folder: SavedFolder) -> None:
    with pytest.raises(InputError) as refused:
        load(saved_folder("sd3"), settings(), attn_implementation="eager")
    assert (refused.value.place, refused.value.value) == ("policy.attn_implementation", "eager")
    load(saved_folder("sd3"), settings(), attn_implementation="sdpa")


@pytest.mark.parametrize("lora", [True, False])
def test_a_trained_pipeline_makes_the_policy_s_images(saved_folder: SavedFolder, tmp_path: Path, lora: bool) -> None:
    policy = load(saved_folder("sd3"), settings(), lora=lora)
    with torch.no_grad():
        for parameter in policy.denoising.trainable_parameters().values():
            parameter.mul_(1.2)
    weights, exported = tmp_path / "weights", tmp_path / "exported"
    weights.mkdir()
    exported.mkdir()
    policy.denoising.save_weights(weights)
    FAMILY.save_whole(saved_folder("sd3"), {"denoising": weights}, exported, dtype=torch.float32)
    (group,) = policy.sample([request(window_start=None)])
    own = diffusers.StableDiffusion3Pipeline.from_pretrained(str(exported))
    own.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(seed) for seed in range(3)]
    images = own(
        "a red dot",
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=4.5,
        num_images_per_prompt=3,
        max_sequence_length=32,
        generator=generator,
    ).images
    for image, expected in zip(group.outputs, images, strict=True):
        # Merged weights round differently.
        assert abs(pixels(image) - pixels(expected)).max() <= 1
