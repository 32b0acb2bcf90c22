"""The GPU memory and disk space of a text-to-image pipeline; no stage of a run computes it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising import estimate as denoising
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
    MemoryEstimate,
    MemoryPart,
    ModelEstimate,
    TransformerEstimate,
    Workload,
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
    """Estimate the GPU memory and disk space that the pipeline needs; nothing is loaded.

    Raises:
        InputError: its configuration files are not on this machine, or no parameter is trained.
    """
    saved, choice, workload = require_saved_pipeline(model), choices["denoising"], workloads["denoising"]
    transformer = build_on_meta(model, saved)
    width, blocks = denoising.hidden_width(saved.transformer), denoising.count_blocks(transformer)
    trained = train_transformer(transformer, choice, model, initial_state=dict)
    shape = SimpleNamespace(num_attention_heads=1, hidden_size=width)
    counts = TransformerEstimate(trained, choice, workload, shape)
    sizes = workload.sizes or (settings.size,)
    patches = {size: _patches(saved, size) for size in sizes}
    largest = max(sizes, key=lambda size: patches[size])
    positions = patches[largest] + _prompt_tokens(saved, settings)
    common: dict[str, Any] = {
        "width": width,
        "positions": positions,
        "passes": passes_per_step(saved, settings),
        "value_bytes": counts.b,
    }
    decoded = min(settings.decode_batch_size, workload.group_size)
    parts = [
        *_weights(model, saved, counts),
        MemoryPart("prompt embeddings", "always", MAX_BYTES, "kept at most"),
        *counts.training_parts(),
        denoising.decoding_part(largest, rows=decoded, vae_width=_vae_width(saved), **common),
        *denoising.pass_parts(
            settings=settings,
            blocks=blocks,
            rows=workload.micro_batch_size,
            checkpointed=choice.gradient_checkpointing,
            **common,
        ),
    ]
    states = _states(saved, settings, largest)
    stored = f"{states / _MIB:.3g} MiB of states per image of {largest}" if states else "size of states not known"
    counted = f"transformer {counts.parameters / 1e9:.3g} B parameters in {blocks} blocks{counts.adapters}; {stored}"
    memory = MemoryEstimate(tuple(part for part in parts if part.bytes))
    return ModelEstimate(memory, counts.checkpoint, counted, patches, states)


def _weights(model: str, saved: SavedPipeline, counts: TransformerEstimate) -> list[MemoryPart]:
    numbers = {TRANSFORMER: counts.parameters}
    others = (part for part in saved.parts if part != TRANSFORMER and is_network(saved, part))
    numbers |= {part: count_parameters(build_on_meta(model, saved, part)) for part in others}
    b = counts.b
    return [
        MemoryPart(f"{part} weights", "always", n * b, f"{n / 1e9:.3g} B parameters x {b} bytes")
        for part, n in numbers.items()
    ]


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
    return denoising.state_bytes(settings, channels * (size.height // scale) * (size.width // scale))
