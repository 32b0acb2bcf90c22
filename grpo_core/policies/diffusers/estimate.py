"""The GPU memory and disk space of a text-to-image pipeline; no stage of a run computes it."""

from collections.abc import Mapping

from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising.estimate import PassEstimate, count_blocks, hidden_width, state_bytes
from grpo_core.policies.diffusers.guidance import passes_per_step
from grpo_core.policies.diffusers.loading import (
    TRANSFORMER,
    build_on_meta,
    is_network,
    require_saved_pipeline,
    train_transformer,
)
from grpo_core.policies.diffusers.prompt_cache import MAX_BYTES
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline
from grpo_core.policies.diffusers.settings import DiffusersSettings
from grpo_core.policies.estimate import (
    MemoryPart,
    ModelEstimate,
    TrainingEstimate,
    Workload,
    combine_parts,
    count_parameters,
)
from grpo_core.policies.trained import TrainingChoice
from grpo_core.streams import Stream

PROMPT_TOKENS = 512
"""Assumed number of ids of a prompt where neither the settings nor the pipeline give one."""

_MIB = 1024**2


def estimate(
    model: str,
    settings: DiffusersSettings,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
) -> ModelEstimate:
    """Estimate as `estimate_resources`, whose errors it raises."""
    saved, choice, workload = require_saved_pipeline(model), choices["denoising"], workloads["denoising"]
    transformer = build_on_meta(model, saved)
    width, blocks = hidden_width(saved.transformer), count_blocks(transformer)
    training = TrainingEstimate(train_transformer(transformer, choice, model, initial_state=dict), choice, workload)
    others = (part for part in saved.parts if part != TRANSFORMER and is_network(saved, part))
    weights = {TRANSFORMER: training.parameters} | {
        part: count_parameters(build_on_meta(model, saved, part)) for part in others
    }
    sizes = workload.sizes or (settings.size,)
    patches = {size: _patches(saved, size) for size in sizes}
    largest = max(sizes, key=lambda size: patches[size])
    positions = patches[largest] + _prompt_tokens(saved, settings)
    passes = PassEstimate(width, positions, passes_per_step(saved, settings), training.b)
    rows, checkpointed = workload.micro_batch_size, choice.gradient_checkpointing
    backward = passes.backward_parts(settings, blocks, rows, checkpointed=checkpointed)
    decoded = min(settings.decode_batch_size, workload.group_size)
    memory = combine_parts(
        {f"{part} weights": count for part, count in weights.items()},
        training.b,
        {"denoising": (training, backward)},
        [
            MemoryPart("prompt embeddings", "always", MAX_BYTES, "kept at most"),
            passes.decoding_part(largest, decoded, _vae_width(saved)),
        ],
    )
    states = _states(saved, settings, largest)
    stored = f"{states / _MIB:.3g} MiB of states per image of {largest}" if states else "size of states not known"
    counted = (
        f"transformer {training.parameters / 1e9:.3g} B parameters in {blocks} blocks{training.adapters}; {stored}"
    )
    return ModelEstimate(memory, training.checkpoint, counted, patches, states)


def _patches(saved: SavedPipeline, size: ImageSize) -> int:
    unit = saved.pixel_unit or 16
    return -(-size.height // unit) * -(-size.width // unit)


def _prompt_tokens(saved: SavedPipeline, settings: DiffusersSettings) -> int:
    default = saved.pipeline_class.call.get("max_sequence_length")
    return settings.max_sequence_length or (default if isinstance(default, int) else PROMPT_TOKENS)


def _vae_width(saved: SavedPipeline) -> int:
    widths = saved.vae.get("block_out_channels") or saved.vae.get("decoder_block_out_channels")
    if widths:
        return int(widths[min(1, len(widths) - 1)])
    return int(saved.vae.get("base_dim", 128))


def _states(saved: SavedPipeline, settings: DiffusersSettings, size: ImageSize) -> int:
    """Return the bytes of an image's stored states; 0 where the configuration files do not say its latents' size."""
    scale, channels = saved.vae_scale, saved.latent_channels
    if scale is None or channels is None:
        return 0
    return state_bytes(settings, channels * (size.height // scale) * (size.width // scale))
