"""Pipelines are loaded, also without a part or with parts in 4 bits, trained in their layers, and written again."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.quantizers.bitsandbytes import bnb_quantizer

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.accepted_pipelines import TRIED
from grpo_core.policies.diffusers.component import DiffusersDenoising
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.loading import (
    absent_parts,
    default_targets,
    load_pipeline,
    require_saved_pipeline,
    train_transformer,
)
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.trained.quantization import QuantizationSettings, quantized_layers
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.seeds import make_generator
from tests.grpo_core.policies.denoising.tiny_pipelines import disturb
from tests.grpo_core.policies.diffusers.tiny_builders import flux
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    CLASSES,
    FAMILIES,
    MAKE,
    NEED_SOURCES,
    SavedFolder,
    SharedPolicy,
    load,
    pixels,
    reduced_sources,
    request,
    settings,
    source,
    without,
)


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


LORA = LoraSettings(rank=4, alpha=8.0)
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
CPU = torch.device("cpu")


def difference(policy: DiffusersPolicy) -> float:
    """The largest of recomputed log-probs from those that were sampled with, all rows and one alone."""
    (group,) = policy.sample([request(samples=3)])
    sampled = group.streams["denoising"]
    policy.denoising.prepare_for_update()
    found = 0.0
    for rows in ([0, 1, 2], [1]):
        again = policy.denoising.logprobs(sampled.actions.select(rows)).logprobs.detach()
        found = max(found, float((again - sampled.rollout_logprobs[rows]).abs().max()))
    return found


def test_text_encoders_are_quantized_on_any_machine(saved_folder: SavedFolder) -> None:
    quantization = QuantizationSettings("nf4", components=ENCODERS)
    choice = TrainingChoice(LORA, quantization=quantization)
    policy = DiffusersPolicy.load(str(saved_folder("sd3")), settings(), {"denoising": choice})
    pipeline = policy.denoising.pipeline
    assert all(any(True for _ in quantized_layers(getattr(pipeline, name))) for name in ENCODERS)
    assert not any(True for _ in quantized_layers(pipeline.transformer))
    disturb(policy.denoising.trained)
    assert difference(policy) < 1e-5


def test_steps_of_a_quantized_transformer_are_scored_as_they_were_drawn(
    saved_folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers asks for a GPU before it does the same on a CPU; without one, its question is left out here."""
    quantizer = bnb_quantizer.BnB4BitDiffusersQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *given, **named: None)
    folder, chosen = str(saved_folder("sd3")), settings()
    quantization = QuantizationSettings("nf4", components=("transformer",))
    pipeline = load_pipeline(folder, dtype=torch.float32, device=CPU, quantization=quantization)
    trained = train_transformer(pipeline.transformer, TrainingChoice(LORA, quantization=quantization), folder)
    disturb(trained)
    policy = DiffusersPolicy(DiffusersDenoising(pipeline, require_saved_pipeline(folder), chosen, trained))
    assert any(True for _ in quantized_layers(pipeline.transformer))
    assert difference(policy) < 1e-5
    (group,) = policy.sample([request(samples=1)])
    policy.denoising.logprobs(group.streams["denoising"].actions).logprobs.sum().backward()
    assert all(each.grad is not None for each in trained.trainable_parameters().values())


def test_a_transformer_in_4_bits_is_refused_without_a_gpu(saved_folder: SavedFolder) -> None:
    choice = TrainingChoice(LORA, quantization=QuantizationSettings("nf4"))
    with pytest.raises(InputError, match="diffusers runs its models in 4 bits on a GPU only"):
        DiffusersPolicy.load(str(saved_folder("sd3")), settings(), {"denoising": choice})


pytestmark = [
    # Ernie's pipeline gives its scheduler a tensor of sigmas.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Chroma's transformer imports it from where it was.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
]


def chosen(*quick: str) -> list[Any]:
    """All names; those that are not quick are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in MAKE]


def test_what_is_called_tried_is_tried() -> None:
    assert list(CLASSES) == list(MAKE)
    assert set(CLASSES.values()) == set(TRIED)


# --- parts that a pipeline was saved without


def drawn(pipeline: Any, name: str, **changes: Any) -> Any:
    """Draw the way diffusers' users do."""
    own = settings(name, num_inference_steps=1, sde_window_size=0)
    described = TRIED[CLASSES[name]]
    given: dict[str, Any] = {**described.fixed_arguments(own.size), **changes}
    if own.max_sequence_length is not None:
        given["max_sequence_length"] = own.max_sequence_length
    if name in NEED_SOURCES:
        given["image"] = source().open()
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline(
        "a dot",
        height=own.height,
        width=own.width,
        **{"num_inference_steps": 1, "generator": make_generator(0), **given},
    ).images
    return image


def draws_without(folder: Path, name: str, *parts: str) -> bool:
    """Whether diffusers loads and draws a pipeline whose parts are given as None."""
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder), **dict.fromkeys(parts))
        with reduced_sources(CLASSES[name]):
            drawn(pipeline, name)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", chosen("sd3"))
def test_a_pipeline_without_a_part_is_loaded_if_diffusers_draws_with_it(
    saved_folder: SavedFolder, name: str, tmp_path: Path
) -> None:
    """Each part alone; a text encoder with its tokenizer as well."""
    folder = saved_folder(name)
    parts = [part for part in require_saved_pipeline(str(folder)).parts if part not in ("transformer", "scheduler")]
    pairs = [(part, part.replace("text_encoder", "tokenizer")) for part in parts if part.startswith("text_encoder")]
    cases = [*((part,) for part in parts), *(pair for pair in pairs if pair[1] in parts)]
    lacked: set[str] = set()
    for case in cases:
        changed = str(without(folder, tmp_path / "_".join(case), *case))
        if draws_without(Path(changed), name, *case):
            assert absent_parts(changed, require_saved_pipeline(changed)).keys() <= set(case)
            lacked.update(case)
            continue
        with pytest.raises(InputError, match="|".join(case)) as refused:
            FAMILY.refuse_unusable(changed, settings(name))
        assert (refused.value.place, refused.value.value) == ("policy.model", changed)
    assert lacked == {"sd3": {"text_encoder_3", "tokenizer_3"}, "ernie_image": {"pe", "pe_tokenizer"}}.get(name, set())


def test_stable_diffusion_3_without_t5_draws_what_diffusers_draws(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = without(saved_folder("sd3"), tmp_path / "small", "text_encoder_3", "tokenizer_3")
    stock = diffusers.StableDiffusion3Pipeline.from_pretrained(str(folder), text_encoder_3=None, tokenizer_3=None)
    chosen = settings("sd3")
    FAMILY.refuse_unusable(str(folder), chosen)
    policy = DiffusersPolicy.load(str(folder), chosen, {"denoising": TrainingChoice(LoraSettings(rank=2))})
    lacking = [name for name, part in policy.denoising.pipeline.components.items() if part is None]
    assert lacking == [name for name, part in stock.components.items() if part is None]
    (group,) = policy.sample([request("a dot", 1, window_start=None)])
    expected = drawn(stock, "sd3", num_inference_steps=5, guidance_scale=chosen.guidance_scale)
    assert (pixels(group.outputs[0]) == pixels(expected)).all()
    with pytest.raises(InputError, match="shorten it") as refused:
        FAMILY.refuse_prompts(str(folder), chosen, ["x" * 25])
    assert "max_sequence_length" not in refused.value.hint


def test_parts_that_only_some_calls_read_are_loaded(tmp_path: Path) -> None:
    """FLUX with what an image adapter needs, and with one half of it."""
    whole = flux()
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, projection_dim=16
    )
    whole.register_modules(
        image_encoder=transformers.CLIPVisionModelWithProjection(vision),
        feature_extractor=transformers.CLIPImageProcessor(),
    )
    whole.save_pretrained(tmp_path / "whole")
    extra = ("image_encoder", "feature_extractor")
    for number, parts in enumerate([(), extra[:1], extra[1:], extra]):
        folder = str(without(tmp_path / "whole", tmp_path / str(number), *parts))
        loaded = load_pipeline(folder, dtype=torch.float32, device=torch.device("cpu"))
        assert {part for part in extra if getattr(loaded, part) is None} == set(parts)
        own = diffusers.DiffusionPipeline.from_pretrained(folder)
        assert (pixels(drawn(loaded, "flux")) == pixels(drawn(own, "flux"))).all()


# --- 16 bits
