"""The GPU memory and disk space of GLM-Image; no stage of a run computes it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising import estimate as denoising
from grpo_core.policies.estimate import (
    BYTES,
    OVERHEAD,
    MemoryEstimate,
    MemoryPart,
    ModelEstimate,
    TransformerEstimate,
    Workload,
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


@dataclass(frozen=True)
class _Component:
    """A trained component: its weights, what training it adds, and its microbatches."""

    counts: TransformerEstimate
    backward: list[MemoryPart]

    @property
    def update_bytes(self) -> int:
        """Bytes of an update at its peak, without what is always in memory."""
        parts = MemoryEstimate((*self.counts.training_parts(), *self.backward))
        return parts.update_peak - parts.phase("always")


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
    counts = {
        "autoregressive weights": count_parameters(networks.autoregressive),
        "decoder weights": count_parameters(networks.decoder),
        "autoencoder weights": count_parameters(networks.vae),
        "glyph encoder weights": count_parameters(networks.text_encoder),
    }
    components: dict[Stream, _Component] = {}
    if "tokens" in choices:
        trained = train_token_model(networks.autoregressive, choices["tokens"], model, initial_state=dict)
        own = TransformerEstimate(trained, choices["tokens"], workloads["tokens"], text, norms=4)
        components["tokens"] = _Component(own, own.backward_parts(length, tokens, codes))
    if "denoising" in choices:
        patches = 4 * max(token_grids(size, unit).large.tokens for size in sizes)
        components["denoising"] = _decoder(model, networks.decoder, settings, choices, workloads, patches)
    b = BYTES[workload.dtype]
    rows = min(settings.decode_batch_size, max(each.group_size for each in workloads.values()))
    parts = [
        *(MemoryPart(name, "always", n * b, f"{n / 1e9:.3g} B parameters x {b} bytes") for name, n in counts.items()),
        *_training_parts(components),
        *sampling_parts(text, workload, length, text.vision_vocab_size, codes),
        max((decoding_part(networks, size, unit, rows, b) for size in sizes), key=lambda part: part.bytes),
    ]
    adapters = "".join(component.counts.adapters for component in components.values())
    latents = vae.latent_channels * max(size.pixels for size in sizes) // scale**2
    states = denoising.state_bytes(settings, latents) if "denoising" in choices else 0
    stored = f"; {states / MIB:.3g} MiB of states per image" if states else ""
    counted = (
        f"token model {counts['autoregressive weights'] / 1e9:.3g} B parameters, "
        f"decoder {counts['decoder weights'] / 1e9:.3g} B{adapters}; images in units of {unit} pixels{stored}"
    )
    memory = MemoryEstimate(tuple(part for part in parts if part.bytes))
    checkpoint = sum(component.counts.checkpoint for component in components.values())
    return ModelEstimate(memory, checkpoint, counted, tokens_of, states)


def _decoder(
    model: str,
    network: Any,
    settings: GlmImageSettings,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
    patches: int,
) -> _Component:
    choice, workload, width, blocks = (
        choices["denoising"],
        workloads["denoising"],
        denoising.hidden_width(network.config),
        denoising.count_blocks(network),
    )
    trained = train_decoder(network, choice, model, initial_state=dict)
    counts = TransformerEstimate(trained, choice, workload, SimpleNamespace(num_attention_heads=1, hidden_size=width))
    backward = denoising.pass_parts(
        settings=settings,
        width=width,
        blocks=blocks,
        positions=patches,
        rows=workload.micro_batch_size,
        passes=2 if settings.guidance_scale > 1 else 1,
        value_bytes=counts.b,
        checkpointed=choice.gradient_checkpointing,
    )
    return _Component(counts, backward)


def _training_parts(components: Mapping[Stream, _Component]) -> list[MemoryPart]:
    """Return what is always in memory for each component, and the update that needs more: one ends before the next."""
    largest = max(components, key=lambda stream: components[stream].update_bytes)
    parts: dict[str, MemoryPart] = {}
    for stream, component in components.items():
        for part in component.counts.training_parts():
            if part.phase == "always":
                # The overhead is the device's, whatever is trained.
                name = part.name if part.name not in parts or part.name == OVERHEAD else f"{stream} {part.name}"
                parts[name] = replace(part, name=name)
    update = [part for part in components[largest].counts.training_parts() if part.phase != "always"]
    return [*parts.values(), *update, *components[largest].backward]


def decoding_part(networks: Components, size: ImageSize, unit: int, rows: int, b: int) -> MemoryPart:
    """Return the largest tensors of the image decoder; it has four patches per large token."""
    widths = networks.vae.config.block_out_channels
    return denoising.decoding_part(
        size,
        width=denoising.hidden_width(networks.decoder.config),
        positions=4 * token_grids(size, unit).large.tokens,
        rows=rows,
        passes=1,  # those of guidance run one after the other
        value_bytes=b,
        vae_width=widths[min(1, len(widths) - 1)],
    )
