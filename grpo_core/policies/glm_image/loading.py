"""The networks of GLM-Image, by folder or hub name, and what of prompts and source images it cannot read.

The configurations of the release, zai-org/GLM-Image, are in the folder `released`, written out in full, so that changed
defaults of a library do not change them: config.json of `vision_language_encoder`, `transformer` and `vae` on the hub.
The glyph encoder's is not published: it is google/byt5-small's encoder (Xue et al., 2022, arXiv:2105.13626), by the
decoder's `text_embed_dim` and the size of the released file.
"""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import Tensor, nn
from transformers import GlmImageProcessor

from grpo_core.errors import InputError, raise_all
from grpo_core.pipeline_files import find_model_file, refuse_missing_folder
from grpo_core.policies import pipeline_loading
from grpo_core.policies.glm_image.processor import UnitProcessor
from grpo_core.policies.glm_image.prompts import refuse_reserved_tokens
from grpo_core.policies.glm_image.settings import (
    AUTOREGRESSIVE,
    DECODER,
    PARTS,
    PROMPT_TOKENS,
    GlmImageSettings,
    SourceLimits,
    nearest_size,
    read_pixel_unit,
    refuse_coarse_codes,
    token_grids,
)
from grpo_core.policies.protocol import first_numbers, numbered_prompt
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.streams import ImageSize, Stream

RELEASED_MODEL = "zai-org/GLM-Image"
# Short names such as "q_proj" would also match the vision tower, which is never trained.
LANGUAGE_MODEL_LINEARS = (
    r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
)
# Flow-GRPO trains the attention of SD3 and attention and feed-forward layers of FLUX; here both, by the same names.
DECODER_LINEARS = r".*transformer_blocks\.\d+\.(attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"

FROZEN_PARTS = ("model.visual.", "model.vqmodel.")
"""Beginnings of the names of the token model's parameters that are neither trained nor quantized."""


def configs_folder(model: str) -> Path:
    """Return the folder of a model's configurations: its own, the hub's cache, or the release's; or InputError."""
    refuse_missing_folder(model)
    folder, cached = Path(model).expanduser(), find_model_file(model, f"{DECODER}/config.json")
    if folder.is_dir():
        return folder
    if cached is not None:
        return cached.parent.parent
    if model == RELEASED_MODEL:
        return Path(__file__).parent / "released"
    hint = f"Download it first, or give a folder; without its files only {RELEASED_MODEL} is known."
    raise InputError("policy.model", model, hint)


def read_token_config(model: str) -> Any:
    """Read the configuration of the token model; errors as `configs_folder` and `read_part_config`."""
    return pipeline_loading.read_part_config(configs_folder(model), PARTS, AUTOREGRESSIVE)


def pixel_unit(pipeline: GlmImagePipeline) -> int:
    """Return the pixels along one side of a large token, which covers two by two patches of the decoder."""
    return int(2 * pipeline.transformer.config.patch_size * pipeline.vae_scale_factor)


def train_half(stream: Stream, network: nn.Module, choice: TrainingChoice, model: str, **options: Any) -> TrainedModel:
    """Make the chosen part of the network of a stream trainable; other arguments and errors as in `train_model`."""
    targets = LANGUAGE_MODEL_LINEARS if stream == "tokens" else DECODER_LINEARS
    return train_model(network, choice, base_name=model, default_targets=targets, own_frozen=FROZEN_PARTS, **options)


def left_alone(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a network that are neither trained nor quantized."""
    return [each for name, each in network.named_parameters() if name.startswith(FROZEN_PARTS)]


def load_pipeline(model: str, **options: Any) -> GlmImagePipeline:
    """Load all components of a GLM-Image, frozen; options and errors as in `pipeline_loading.load_pipeline`."""

    def read(**arguments: Any) -> GlmImagePipeline:
        # A processor for another unit than 32 is code in the folder; ours reads its settings, and that code never runs.
        pipeline: GlmImagePipeline = GlmImagePipeline.from_pretrained(
            model, processor=None, use_safetensors=True, trust_remote_code=False, **arguments
        )
        pipeline.register_modules(processor=UnitProcessor.from_pretrained(model, subfolder="processor"))
        keep_rotary_tables(pipeline.transformer.rope)
        drop_by_product(pipeline.transformer)
        if pipeline.processor.unit != (unit := pixel_unit(pipeline)):
            hint = f'Its tokens have {unit} pixels; write "unit": {unit} into processor/processor_config.json.'
            raise InputError("policy.model", model, hint)
        return pipeline

    options = {"left_alone": left_alone, **options}
    pipeline: GlmImagePipeline = pipeline_loading.load_pipeline(model, read, PARTS, configs_folder(model), **options)
    return pipeline


def keep_rotary_tables(rope: Any) -> None:
    """Have the decoder's rotary embedding make the table of a size once, and keep it on the device of the latents.

    diffusers 0.42 makes it on the CPU in every pass, from where each layer moves it for queries and keys.
    """
    make, tables = rope.forward, dict[Hashable, tuple[Tensor, Tensor]]()

    def forward(latents: Tensor) -> tuple[Tensor, Tensor]:
        key = latents.shape[-2:], latents.device
        if key not in tables:
            cosines, sines = make(latents)
            tables[key] = cosines.to(latents.device), sines.to(latents.device)
        return tables[key]

    rope.forward = forward


def drop_by_product(transformer: nn.Module) -> None:
    """Have the decoder drop the draft's tokens of an unconditional pass by a product, to the bit what it computes.

    diffusers 0.42 indexes their embeddings by a mask, and the host waits for the GPU to count its places in every pass.
    """
    masks: list[Tensor] = []

    def take_mask(_: nn.Module, inputs: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        masks[:] = [arguments["prior_token_drop"].unsqueeze(-1)]
        return inputs, {**arguments, "prior_token_drop": slice(0)}

    def drop(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        (embedding,) = inputs
        return torch.where(masks.pop(), embedding * 0.0, embedding) if masks else embedding

    transformer.register_forward_pre_hook(take_mask, with_kwargs=True)
    transformer.get_submodule("prior_projector").register_forward_pre_hook(drop)


def refuse_unusable_prompts(model: str, settings: GlmImageSettings, prompts: Sequence[str]) -> None:
    """Raise InputError for prompts with reserved tags, or too long for the positions; only the processor is loaded."""
    processor = GlmImageProcessor.from_pretrained(model, subfolder="processor")
    positions, unit = _positions(model), read_pixel_unit(model)
    room = positions - (0 if unit is None else token_grids(nearest_size(settings.size, unit), unit).tokens)
    errors = []
    for prompt, number in first_numbers(prompts).items():
        with numbered_prompt(number):
            refuse_reserved_tokens(processor, prompt)
        # No id is shorter than a byte.
        if len(prompt.encode()) > room and (length := len(processor.tokenizer(prompt).input_ids)) > room:
            hint = f"It has {length} ids, and at most {room} leave room for an image in the model's {positions}."
            errors.append(InputError(f"prompt {number}", f"{prompt[:80]}...", f"{hint} Shorten it."))
    raise_all(errors)


def _positions(model: str) -> int:
    return int(read_token_config(model).text_config.max_position_embeddings)


def refuse_unusable_sources(model: str, settings: GlmImageSettings, images: Sequence[Sequence[ImageSize]]) -> None:
    """Raise InputError for every prompt whose source images (their sizes) the model cannot read, or not all of them."""
    limits = SourceLimits.of(GlmImageProcessor.from_pretrained(model, subfolder="processor").image_processor)
    unit = read_pixel_unit(model)
    if unit is not None:
        refuse_coarse_codes(model, limits.unit, unit)
    positions = _positions(model)
    errors = []
    for number, sizes in enumerate(images, start=1):
        try:
            read = [limits.nearest(size) for size in sizes]
        except InputError as error:
            errors.append(InputError(f"source image of prompt {number}", error.value, error.hint))
            continue
        # Each image, its start and its end, then the text and the image that is made.
        made = settings.size.pixels // limits.unit**2 + PROMPT_TOKENS
        if made + sum(size.pixels // limits.unit**2 + 2 for size in read) > positions:
            hint = f"Token model, text and images have {positions} positions together; give fewer or smaller images."
            errors.append(InputError(f"images of prompt {number}", f"{len(read)} images", hint))
    raise_all(errors)
