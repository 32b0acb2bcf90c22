"""GLM-Image as a kind of policy."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.policies.denoising.settings import refuse_scheduler
from grpo_core.policies.glm_image.settings import PROMPT_TOKENS, GlmImageSettings, read_pixel_unit, token_grids
from grpo_core.policies.pipeline_files import (
    INDEX_FILE,
    find_model_file,
    pipeline_parts,
    read_pipeline_file,
    refuse_missing_folder,
    refuse_missing_parts,
    refuse_missing_weights,
)
from grpo_core.policies.protocol import PolicyFamily, read_settings
from grpo_core.policies.trained.quantization import QuantizationSettings
from grpo_core.streams import ImageSize, Modality, Stream

if TYPE_CHECKING:
    import torch

    from grpo_core.policies.glm_image.policy import GlmImagePolicy
    from grpo_core.policies.sizes import ModelSizes
    from grpo_core.policies.trained.settings import TrainingChoice

_PIPELINE = "GlmImagePipeline"
_CHECKED: set[str] = set()
"""Configurations and choices that have passed in this process; to build and adapt the networks takes a while."""


class GlmImageFamily:
    """GLM-Image as a PolicyFamily; the models' libraries are imported on first use, because that takes seconds."""

    modality: Modality = "image"
    streams: tuple[Stream, ...] = ("tokens", "denoising")
    reads_images: bool = False

    def settings(self, values: Mapping[str, Any]) -> GlmImageSettings:
        """Return the sampling settings from a configuration section or a stored row."""
        return read_settings(GlmImageSettings, values)

    def policy_class(self) -> "type[GlmImagePolicy]":
        """Import its libraries and return the class."""
        from grpo_core.policies.glm_image.policy import GlmImagePolicy

        return GlmImagePolicy

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model of this kind."""
        refuse_missing_folder(model)
        index = find_model_file(model, INDEX_FILE)
        name = _PIPELINE if index is None else read_pipeline_file(model, index).get("_class_name", _PIPELINE)
        if name != _PIPELINE:
            hint = f"It is a {name}; set policy.kind to diffusers, or give GLM-Image's folder."
            raise InputError("policy.model", model, hint)

    def refuse_unusable(self, model: str, settings: GlmImageSettings) -> None:
        """Raise InputError for a size, a scheduler or missing files that it cannot sample with; a hub name may pass."""
        file = find_model_file(model, "scheduler/scheduler_config.json")
        if file is not None:
            scheduler = read_pipeline_file(model, file)
            refuse_scheduler(model, scheduler.get("_class_name"), scheduler)
        unit = read_pixel_unit(model)
        if unit is not None:
            token_grids(settings.size, unit)
        index = find_model_file(model, INDEX_FILE)
        if index is not None:
            parts = pipeline_parts(read_pipeline_file(model, index))
            refuse_missing_parts(model, parts)
            refuse_missing_weights(model, parts)

    def refuse_quantization(
        self,
        model: str,
        quantization: QuantizationSettings | None,
        streams: Sequence[Stream],
        device: "torch.device",
        *,
        adapters: bool,
    ) -> None:
        """Raise InputError if the weights cannot be quantized as chosen on this device, or are stored quantized."""
        from grpo_core.policies.glm_image.loading import require_usable_weights

        require_usable_weights(model, quantization, streams, device, adapters=adapters)

    def refuse_prompts(
        self,
        model: str,
        settings: GlmImageSettings,
        prompts: Sequence[str],
        images: Sequence[Sequence["ImageSize"]] = (),
    ) -> None:
        """Raise InputError for a prompt with reserved tags, or with more text or other images than the model reads."""
        from grpo_core.policies.glm_image.loading import refuse_unusable_prompts, refuse_unusable_sources

        refuse_unusable_prompts(model, settings, prompts)
        if any(images):
            refuse_unusable_sources(model, settings, images)

    def example_ids(
        self, model: str, settings: GlmImageSettings, output: "ImageSize | str", *, edited: bool, seed: int
    ) -> list[int] | None:
        """Return codes for the grids of an image; None if the model is not on this machine."""
        unit = read_pixel_unit(model)
        if unit is None:
            return None
        assert isinstance(output, ImageSize), "it generates images"
        from grpo_core.policies.glm_image.loading import find_configs

        grids, codes = token_grids(output, unit), find_configs(model).autoregressive.vq_config.num_embeddings
        draw = random.Random(seed)
        return [draw.randrange(codes) for _ in range((grids.of_edit if edited else grids).tokens)]

    def save_whole(self, base: Path, weights: Mapping[Stream, Path], folder: Path, *, dtype: "torch.dtype") -> None:
        """Write the pipeline with trained weights in its trained parts, and its other parts as they are."""
        from grpo_core.policies.glm_image.loading import trained_parts
        from grpo_core.policies.trained.whole import save_pipeline

        save_pipeline(base, folder, trained_parts(base, weights, dtype))

    def check_choices(self, model: str, choices: Mapping[Stream, "TrainingChoice"]) -> tuple[str, ...]:
        """Raise InputError if a choice matches nothing in the model, which is built on the meta device."""
        from grpo_core.policies.glm_image.decoding import train_decoder
        from grpo_core.policies.glm_image.loading import build_on_meta, find_configs
        from grpo_core.policies.glm_image.policy import train_token_model

        configs = find_configs(model)
        checked = f"{configs} {dict(choices)}"
        # The files of an adapter may have changed.
        if checked in _CHECKED and not any(each.adapter for each in choices.values()):
            return ()
        networks = build_on_meta(configs)
        if "tokens" in choices:
            train_token_model(networks.autoregressive, choices["tokens"], base_name=model)
        if "denoising" in choices:
            train_decoder(networks.decoder, choices["denoising"], base_name=model)
        _CHECKED.add(checked)
        return ()

    def sizes(
        self,
        model: str,
        settings: GlmImageSettings,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence[ImageSize],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count every network, and the ids and patches of the images that have most of them."""
        from grpo_core.policies.glm_image.decoding import train_decoder
        from grpo_core.policies.glm_image.loading import build_on_meta, find_configs, quantized_networks
        from grpo_core.policies.glm_image.policy import train_token_model
        from grpo_core.policies.sizes import (
            ComponentSizes,
            ModelSizes,
            cached_values,
            count_blocks,
            count_parameters,
            hidden_width,
            shown_count,
        )

        configs = find_configs(model)
        networks, text = build_on_meta(configs), configs.autoregressive.text_config
        counts = {
            "autoregressive weights": count_parameters(networks.autoregressive),
            "decoder weights": count_parameters(networks.decoder),
            "autoencoder weights": count_parameters(networks.vae),
            "glyph encoder weights": count_parameters(networks.text_encoder),
        }
        quantization = next((choice.quantization for choice in choices.values()), None)
        quantized = quantized_networks(model, networks, quantization)
        vae, width, blocks = networks.vae.config, hidden_width(networks.decoder.config), count_blocks(networks.decoder)
        scale = 2 ** (len(vae.block_out_channels) - 1)
        unit = 2 * networks.decoder.config.patch_size * scale
        grids = {size: token_grids(size, unit) for size in images or (settings.size,)}
        tokens, pixels = max(each.tokens for each in grids.values()), max(size.pixels for size in grids)
        # The decoder has four patches per large token.
        patches = 4 * max(each.large.tokens for each in grids.values())
        # The last sampled token is never fed back.
        length = PROMPT_TOKENS + tokens - 1
        components: dict[Stream, ComponentSizes] = {}
        if choice := choices.get("tokens"):
            components["tokens"] = ComponentSizes(
                trained=train_token_model(networks.autoregressive, choice, base_name=model, initial_state=dict),
                width=text.hidden_size,
                blocks=text.num_hidden_layers,
                positions=length,
                scored=tokens,
                vocabulary=configs.autoregressive.vq_config.num_embeddings,
            )
        if choice := choices.get("denoising"):
            components["denoising"] = ComponentSizes(
                trained=train_decoder(networks.decoder, choice, base_name=model, initial_state=dict),
                width=width,
                blocks=blocks,
                positions=patches,
                steps=max(1, settings.sde_window_size),
                passes=2 if settings.guidance_scale > 1 else 1,
            )
        return ModelSizes(
            networks=counts,
            quantized=quantized,
            needed={
                "autoregressive weights": frozenset({"sampling", "tokens backward", "tokens step"}),
                "decoder weights": frozenset({"decoding", "denoising backward", "denoising step"}),
                "autoencoder weights": frozenset({"decoding"}),
                "glyph encoder weights": frozenset({"decoding", "denoising backward", "denoising step"}),
            },
            components=components,
            described=(
                f"token model {shown_count(counts['autoregressive weights'])} parameters, decoder "
                f"{shown_count(counts['decoder weights'])}, images in units of {unit} pixels, prompts counted as "
                f"{PROMPT_TOKENS} ids"
            ),
            cached=length * cached_values(text),
            head=text.vision_vocab_size,
            # The passes of guidance run one after the other.
            image_values=patches * width,
            image_pixels=pixels,
            image_channels=vae.block_out_channels[min(1, len(vae.block_out_channels) - 1)],
            state_values=vae.latent_channels * pixels // scale**2,
            tokens={size: each.tokens for size, each in grids.items()},
        )


FAMILY: PolicyFamily = GlmImageFamily()
