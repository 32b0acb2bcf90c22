"""The GPU memory and disk space of GLM-Image; no stage of a run computes it."""

from collections.abc import Mapping

from grpo_core.image_size import ImageSize
from grpo_core.policies.estimate import (
    MemoryEstimate,
    MemoryPart,
    ModelEstimate,
    TransformerEstimate,
    Workload,
    count_parameters,
)
from grpo_core.policies.glm_image.loading import Components, build_on_meta, find_configs
from grpo_core.policies.glm_image.settings import GlmImageSettings, token_grids
from grpo_core.policies.glm_image.token_model import train_token_model
from grpo_core.policies.trained import TrainingChoice
from grpo_core.streams import Stream

PROMPT_TOKENS = 256
"""Assumed number of ids of the longest prompt of a batch, grid tags included."""


def estimate(
    model: str,
    settings: GlmImageSettings,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
) -> ModelEstimate:
    """Estimate the GPU memory and disk space that the model needs; nothing is loaded.

    A batch has images of one size, and a microbatch may: each part of the memory is that of the size that needs most.

    Raises:
        InputError: its configurations are not on this machine, or no parameter is trained.
    """
    configs, choice, workload = find_configs(model), choices["tokens"], workloads["tokens"]
    networks = build_on_meta(configs)
    trained = train_token_model(networks.autoregressive, choice, model, initial_state=dict)
    text = configs.autoregressive.text_config
    transformer = TransformerEstimate(trained, choice, workload, text, norms=4)
    unit = 2 * networks.decoder.config.patch_size * 2 ** (len(networks.vae.config.block_out_channels) - 1)
    sizes = workload.sizes or (settings.size,)
    tokens_of = {size: token_grids(size, unit).tokens for size in sizes}
    tokens, rows = max(tokens_of.values()), min(settings.decode_batch_size, workload.group_size)
    # The last sampled token is never fed back.
    length = PROMPT_TOKENS + tokens - 1
    codes = configs.autoregressive.vq_config.num_embeddings
    counts = {
        "autoregressive weights": transformer.parameters,
        "decoder weights": count_parameters(networks.decoder),
        "autoencoder weights": count_parameters(networks.vae),
        "glyph encoder weights": count_parameters(networks.text_encoder),
    }
    b = transformer.b
    parts = [
        *(MemoryPart(name, "always", n * b, f"{n / 1e9:.3g} B parameters x {b} bytes") for name, n in counts.items()),
        *transformer.training_parts(),
        *transformer.sampling_parts(length, text.vision_vocab_size, codes),
        max((decoding_part(networks, size, unit, rows, b) for size in sizes), key=lambda part: part.bytes),
        *transformer.backward_parts(length, tokens, codes),
    ]
    counted = (
        f"token model {transformer.parameters / 1e9:.3g} B parameters, "
        f"decoder {counts['decoder weights'] / 1e9:.3g} B{transformer.adapters}; images in units of {unit} pixels"
    )
    memory = MemoryEstimate(tuple(part for part in parts if part.bytes))
    return ModelEstimate(memory, transformer.checkpoint, counted, tokens_of)


def decoding_part(networks: Components, size: ImageSize, unit: int, rows: int, b: int) -> MemoryPart:
    """Return the largest tensors of the image decoder.

    A block of the diffusion transformer has about 16 tensors of [rows, patches, hidden], four patches per large token;
    the passes of guidance run one after the other. The autoencoder, one image at a time, has about 4 tensors of
    [channels, height, width] at full resolution and the width of its block before the last.
    """
    decoder, widths = networks.decoder.config, networks.vae.config.block_out_channels
    patches = 4 * token_grids(size, unit).large.tokens
    denoising = 16 * rows * patches * decoder.num_attention_heads * decoder.attention_head_dim * b
    autoencoder = 4 * widths[min(1, len(widths) - 1)] * size.pixels * b
    what = f"{size}: a decoder block for {rows} images, or the autoencoder for one"
    return MemoryPart("decoding", "decoding", max(denoising, autoencoder), what)
