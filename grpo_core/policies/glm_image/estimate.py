"""The GPU memory and disk space of GLM-Image; no stage of a run computes it."""

from collections.abc import Mapping

from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising.estimate import PassEstimate, count_blocks, hidden_width, state_bytes
from grpo_core.policies.estimate import (
    BYTES,
    MemoryPart,
    ModelEstimate,
    TrainingEstimate,
    Workload,
    backward_parts,
    combine_parts,
    count_parameters,
    sampling_parts,
)
from grpo_core.policies.glm_image.decoder import train_decoder
from grpo_core.policies.glm_image.loading import Components, build_on_meta, find_configs
from grpo_core.policies.glm_image.settings import GlmImageSettings, token_grids
from grpo_core.policies.glm_image.token_model import train_token_model
from grpo_core.policies.trained import TrainingChoice
from grpo_core.streams import Stream

MIB = 1024**2
PROMPT_TOKENS = 256
"""Assumed number of ids of the longest prompt of a batch, grid tags included."""


def estimate(
    model: str,
    settings: GlmImageSettings,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
) -> ModelEstimate:
    """Estimate as `estimate_resources`, whose errors it raises.

    A batch has images of one size, and a microbatch may: each part of the memory is that of the size that needs most.
    """
    configs = find_configs(model)
    networks = build_on_meta(configs)
    text, vae = configs.autoregressive.text_config, networks.vae.config
    scale = 2 ** (len(vae.block_out_channels) - 1)
    unit = 2 * networks.decoder.config.patch_size * scale
    workload = next(iter(workloads.values()))
    sizes = workload.sizes or (settings.size,)
    tokens_of = {size: token_grids(size, unit).tokens for size in sizes}
    tokens = max(tokens_of.values())
    # The last sampled token is never fed back.
    length, codes = PROMPT_TOKENS + tokens - 1, configs.autoregressive.vq_config.num_embeddings
    weights = {
        "autoregressive weights": count_parameters(networks.autoregressive),
        "decoder weights": count_parameters(networks.decoder),
        "autoencoder weights": count_parameters(networks.vae),
        "glyph encoder weights": count_parameters(networks.text_encoder),
    }
    components: dict[Stream, tuple[TrainingEstimate, list[MemoryPart]]] = {}
    if choice := choices.get("tokens"):
        trained = train_token_model(networks.autoregressive, choice, base_name=model, initial_state=dict)
        training = TrainingEstimate(trained, choice, workloads["tokens"])
        components["tokens"] = training, backward_parts(training, text, length, tokens, codes, norms=4)
    if choice := choices.get("denoising"):
        blocks = count_blocks(networks.decoder)
        largest = max(sizes, key=lambda size: token_grids(size, unit).large.tokens)
        trained = train_decoder(networks.decoder, choice, base_name=model, initial_state=dict)
        training = TrainingEstimate(trained, choice, workloads["denoising"])
        passes = _passes(networks, largest, unit, 2 if settings.guidance_scale > 1 else 1, training.b)
        rows, checkpointed = training.workload.micro_batch_size, choice.gradient_checkpointing
        components["denoising"] = (
            training,
            passes.backward_parts(settings, blocks, rows, checkpointed=checkpointed),
        )
    b = BYTES[workload.dtype]
    rows = min(settings.decode_batch_size, max(each.group_size for each in workloads.values()))
    decoding = max((decoding_part(networks, size, unit, rows, b) for size in sizes), key=lambda part: part.bytes)
    sampling = sampling_parts(text, workload, length, text.vision_vocab_size, codes)
    adapters = "".join(training.adapters for training, _ in components.values())
    latents = vae.latent_channels * max(size.pixels for size in sizes) // scale**2
    states = state_bytes(settings, latents) if "denoising" in choices else 0
    stored = f"; {states / MIB:.3g} MiB of states per image" if states else ""
    counted = (
        f"token model {weights['autoregressive weights'] / 1e9:.3g} B parameters, "
        f"decoder {weights['decoder weights'] / 1e9:.3g} B{adapters}; images in units of {unit} pixels{stored}"
    )
    checkpoint = sum(training.checkpoint for training, _ in components.values())
    memory = combine_parts(weights, b, components, [*sampling, decoding])
    return ModelEstimate(memory, checkpoint, counted, tokens_of, states)


def decoding_part(networks: Components, size: ImageSize, unit: int, rows: int, b: int) -> MemoryPart:
    """Return the largest tensors of the image decoder, whose passes of guidance run one after the other."""
    widths = networks.vae.config.block_out_channels
    passes = _passes(networks, size, unit, 1, b)
    return passes.decoding_part(size, rows, widths[min(1, len(widths) - 1)])


def _passes(networks: Components, size: ImageSize, unit: int, passes: int, b: int) -> PassEstimate:
    """Return the sizes of the decoder's passes; it has four patches per large token."""
    return PassEstimate(hidden_width(networks.decoder.config), 4 * token_grids(size, unit).large.tokens, passes, b)
