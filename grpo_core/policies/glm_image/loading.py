"""The configurations of GLM-Image's four networks, the networks on meta, and the pipeline, by folder or hub name.

The release is zai-org/GLM-Image. Source: config.json of `vision_language_encoder`, `transformer` and `vae` on the hub.
The glyph encoder's configuration is not published; it is the encoder of google/byt5-small (Xue et al., 2022,
arXiv:2105.13626), whose width is the decoder's `text_embed_dim` and whose size in fp32 is that of the released file.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from torch import Tensor, nn
from transformers import GlmImageConfig, GlmImageForConditionalGeneration, GlmImageProcessor, T5Config, T5EncoderModel

from grpo_core.errors import InputError, raise_all
from grpo_core.policies.denoising.rows import load_frozen
from grpo_core.policies.glm_image.autoregressive import refuse_reserved_tokens
from grpo_core.policies.glm_image.processor import UnitProcessor
from grpo_core.policies.glm_image.settings import (
    PROMPT_TOKENS,
    GlmImageSettings,
    SourceLimits,
    nearest_size,
    read_pixel_unit,
    refuse_coarse_codes,
    token_grids,
)
from grpo_core.policies.pipeline_files import refuse_missing_folder
from grpo_core.policies.pipeline_quantization import (
    Parts,
    loading_options,
    quantized_parts,
    quantized_sizes,
    require_usable_parts,
)
from grpo_core.policies.protocol import first_numbers, numbered_prompt
from grpo_core.policies.trained.quantization import QuantizationSettings, default_skips, prepare_layers
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.policies.trained.whole import TrainedPart
from grpo_core.streams import ImageSize, Stream

RELEASED_MODEL = "zai-org/GLM-Image"
AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER = "vision_language_encoder", "transformer", "vae", "text_encoder"
_NETWORKS: Mapping[Stream, tuple[Any, str]] = {
    "tokens": (GlmImageForConditionalGeneration, AUTOREGRESSIVE),
    "denoising": (GlmImageTransformer2DModel, DECODER),
}
PARTS: Parts = {
    AUTOREGRESSIVE: ("transformers", "GlmImageForConditionalGeneration"),
    DECODER: ("diffusers", "GlmImageTransformer2DModel"),
    TEXT_ENCODER: ("transformers", "T5EncoderModel"),
}
"""The networks that can be quantized."""

FROZEN_PARTS = ("model.visual.", "model.vqmodel.")
"""Beginnings of the names of the token model's parameters that are neither trained nor quantized."""


@dataclass(frozen=True)
class ComponentConfigs:
    """The configuration of each network.

    Attributes:
        autoregressive: the token model with its vision tower and quantizer.
        decoder: arguments of GlmImageTransformer2DModel.
        vae: arguments of AutoencoderKL.
        text_encoder: the glyph encoder.
    """

    autoregressive: GlmImageConfig
    decoder: Mapping[str, object]
    vae: Mapping[str, object]
    text_encoder: T5Config


@dataclass(frozen=True)
class Components:
    """The networks; those of diffusers have a `config`."""

    autoregressive: nn.Module
    decoder: Any
    vae: Any
    text_encoder: nn.Module


def read_configs(folder: Path) -> ComponentConfigs:
    """Read the configurations of a saved pipeline; no weights are opened.

    Args:
        folder: written by `save_pretrained`, or a hub snapshot of the configuration files.

    Raises:
        InputError: a component's config.json is missing or invalid.
    """
    for part in (AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER):
        # For a missing file transformers returns the class's defaults, which are those of the release.
        if not (folder / part / "config.json").is_file():
            hint = f"It has no {part}/config.json; give the folder of a complete saved pipeline."
            raise InputError("policy.model", str(folder), hint)
    try:
        return ComponentConfigs(
            autoregressive=GlmImageConfig.from_pretrained(folder, subfolder=AUTOREGRESSIVE, local_files_only=True),
            decoder=_diffusers_config(GlmImageTransformer2DModel, folder, DECODER),
            vae=_diffusers_config(AutoencoderKL, folder, VAE),
            text_encoder=T5Config.from_pretrained(folder, subfolder=TEXT_ENCODER, local_files_only=True),
        )
    except OSError as error:
        first_line = str(error).strip().splitlines()[0]
        hint = f"Give the folder of a complete saved pipeline ({first_line})."
        raise InputError("policy.model", str(folder), hint) from error


def _diffusers_config(network: type, folder: Path, subfolder: str) -> Mapping[str, object]:
    config: Mapping[str, object] = network.load_config(folder, subfolder=subfolder, local_files_only=True)  # type: ignore[attr-defined]
    return config


def find_configs(model: str) -> ComponentConfigs:
    """Find the configurations of a folder or a hub name: in the local cache, or those of the release given here.

    Args:
        model: folder or hub name, as in `policy.model`.

    Raises:
        InputError: no such folder, or a hub name that is neither cached nor the release.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    refuse_missing_folder(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_configs(folder)
    try:
        return read_configs(Path(snapshot_download(model, local_files_only=True, allow_patterns=["*config.json"])))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        if model == RELEASED_MODEL:
            return released_configs()
        hint = f"Download it first, or give a folder; without its files only {RELEASED_MODEL} is known."
        raise InputError("policy.model", model, hint) from error


def build_on_meta(configs: ComponentConfigs) -> Components:
    """Build the networks on the meta device: every shape and name, no memory and no values."""
    with torch.device("meta"):
        return Components(
            autoregressive=GlmImageForConditionalGeneration(configs.autoregressive),
            decoder=GlmImageTransformer2DModel.from_config(dict(configs.decoder)),
            vae=AutoencoderKL.from_config(dict(configs.vae)),
            text_encoder=T5EncoderModel(configs.text_encoder),
        )


def released_configs() -> ComponentConfigs:
    """Return the configurations of the released model: 10.1 B parameters of the token model, 6.93 B of the decoder."""
    return ComponentConfigs(
        autoregressive=_autoregressive(),
        decoder={
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 30,
            "attention_head_dim": 128,
            "num_attention_heads": 32,
            "text_embed_dim": 1472,
            "time_embed_dim": 512,
            "condition_dim": 256,
            "prior_vq_quantizer_codebook_size": 16384,
        },
        vae={
            "latent_channels": 16,
            "block_out_channels": (128, 512, 1024, 1024),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "layers_per_block": 3,
            "mid_block_add_attention": False,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "sample_size": 1024,
        },
        text_encoder=T5Config(
            vocab_size=384,
            d_model=1472,
            d_kv=64,
            d_ff=3584,
            num_layers=12,
            num_heads=6,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    )


def _autoregressive() -> GlmImageConfig:
    # Written out in full, so that changed defaults of a library do not change the release's configuration.
    return GlmImageConfig(
        text_config={
            "vocab_size": 168064,
            "vision_vocab_size": 16512,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 40,
            "hidden_size": 1536,
            "num_heads": 16,
            "intermediate_size": 6144,
            "image_size": 2048,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 2048, "num_embeddings": 16384, "latent_channels": 1536},
    )


def pixel_unit(pipeline: GlmImagePipeline) -> int:
    """Return the pixels along one side of a large token, which covers two by two patches of the decoder."""
    return int(2 * pipeline.transformer.config.patch_size * pipeline.vae_scale_factor)


def require_usable_weights(
    model: str,
    quantization: QuantizationSettings | None,
    streams: Iterable[Stream],
    device: torch.device,
    *,
    adapters: bool,
) -> Mapping[str, QuantizationSettings]:
    """Return how each quantized network is quantized; arguments and errors as `require_usable_parts`."""
    trained = [_NETWORKS[stream][1] for stream in streams]
    return require_usable_parts(model, PARTS, quantization, device, trained=trained, adapters=adapters)


def modules_in_full(networks: Components, part: str) -> list[str]:
    """Return the modules of a network of transformers that are never quantized."""
    if part == DECODER:
        return []
    network = {AUTOREGRESSIVE: networks.autoregressive, TEXT_ENCODER: networks.text_encoder}[part]
    others = (id(each) for name, each in network.named_parameters() if name.startswith(FROZEN_PARTS))
    return default_skips(network, others)


def quantized_networks(
    model: str, networks: Components, quantization: QuantizationSettings | None
) -> dict[str, tuple[int, int]]:
    """Return the number of quantized weights of each network, and their bytes, by the network's name in an estimate."""
    own = {AUTOREGRESSIVE: networks.autoregressive, DECODER: networks.decoder, TEXT_ENCODER: networks.text_encoder}
    found = quantized_sizes(model, PARTS, own, quantization, partial(modules_in_full, networks))
    names = {AUTOREGRESSIVE: "autoregressive", DECODER: "decoder", TEXT_ENCODER: "glyph encoder"}
    return {f"{names[part]} weights": size for part, size in found.items()}


def load_pipeline(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSettings | None = None,
    offloaded: Collection[str] = (),
) -> GlmImagePipeline:
    """Load all components of a GLM-Image, frozen, in evaluation mode.

    Args:
        model: a folder written by `save_pretrained`, or a hub name such as zai-org/GLM-Image.
        quantization: of its networks; None: as they are stored.
        offloaded: names of the parts that are left where they are loaded, in CPU memory unless they are quantized.

    Raises:
        InputError: the folder does not exist or is no pipeline, or the hub's files are not available.
    """
    refuse_missing_folder(model)

    def read() -> GlmImagePipeline:
        skips = partial(modules_in_full, build_on_meta(find_configs(model)))
        options = loading_options(PARTS, quantization, dtype, device, skips)
        # A processor for another unit than 32 is code in the folder; ours reads its settings, and that code never runs.
        pipeline = GlmImagePipeline.from_pretrained(
            model, processor=None, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options
        )
        pipeline.register_modules(processor=UnitProcessor.from_pretrained(model, subfolder="processor"))
        if pipeline.processor.unit != (unit := pixel_unit(pipeline)):
            hint = f'Its tokens have {unit} pixels; write "unit": {unit} into processor/processor_config.json.'
            raise InputError("policy.model", model, hint)
        return pipeline

    pipeline: GlmImagePipeline = load_frozen(model, read, device, offloaded)
    for part in (AUTOREGRESSIVE, DECODER, TEXT_ENCODER):
        prepare_layers(getattr(pipeline, part), quantization if part in quantized_parts(PARTS, quantization) else None)
    return pipeline


def offloaded_parts(choices: Mapping[Stream, TrainingChoice]) -> tuple[str, ...]:
    """Return the names of the parts that can be off the device; one whose own weights are trained stays on it."""
    full = {_NETWORKS[stream][1] for stream, choice in choices.items() if choice.lora is None}
    return tuple(part for part in (AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER) if part not in full)


def _load_network(model: str, stream: Stream, dtype: torch.dtype) -> Any:
    """Load the published network that makes a stream's actions, on the CPU."""
    transformers.utils.logging.disable_progress_bar()
    network, subfolder = _NETWORKS[stream]
    return network.from_pretrained(model, subfolder=subfolder, dtype=dtype, use_safetensors=True)


def read_initial_state(model: str, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the published weights of the network that makes a stream's actions."""
    state: dict[str, Tensor] = _load_network(model, stream, dtype).state_dict()
    return state


def trained_parts(base: Path, weights: Mapping[Stream, Path], dtype: torch.dtype) -> dict[str, TrainedPart]:
    """Return the trained parts of a pipeline by their name in it.

    Args:
        base: folder of the pipeline that was trained.
        weights: folders of the stored components by stream.
        dtype: of the base's weights.
    """
    return {
        _NETWORKS[stream][1]: TrainedPart(folder, partial(_load_network, str(base), stream, dtype))
        for stream, folder in weights.items()
    }


def refuse_unusable_prompts(model: str, settings: GlmImageSettings, prompts: Sequence[str]) -> None:
    """Refuse prompts with the model's reserved tags, or too long for its positions; only its processor is loaded.

    Raises:
        InputError: names the first prompt with a tag, or every prompt that is too long.
    """
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
    """Return how many ids of prompts and images the token model reads and writes together."""
    return int(find_configs(model).autoregressive.text_config.max_position_embeddings)


def refuse_unusable_sources(model: str, settings: GlmImageSettings, images: Sequence[Sequence[ImageSize]]) -> None:
    """Refuse source images that the model cannot read; only configurations are loaded.

    Args:
        images: sizes of the source images of each prompt.

    Raises:
        InputError: the model cannot edit, an image is too long, or a prompt has more images than the token model has
            positions for; names every such prompt.
    """
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
