"""GLM-Image as a kind of policy."""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.pipeline_files import (
    INDEX_FILE,
    Parts,
    find_model_file,
    pipeline_parts,
    read_pipeline_file,
    refuse_missing_parts,
    refuse_missing_weights,
)
from grpo_core.policies.denoising.settings import refuse_scheduler
from grpo_core.policies.glm_image.settings import (
    AUTOREGRESSIVE,
    DECODER,
    PARTS,
    PROMPT_TOKENS,
    TEXT_ENCODER,
    TRAINED,
    VAE,
    GlmImageSettings,
    read_pixel_unit,
    token_grids,
)
from grpo_core.policies.protocol import PolicyFamily
from grpo_core.policies.trained.quantization import count_quantized
from grpo_core.rollouts.streams import ImageSize, Stream

if TYPE_CHECKING:
    from grpo_core.policies.glm_image.policy import GlmImagePolicy
    from grpo_core.policies.sizes import ModelSizes, Phase
    from grpo_core.policies.trained.model import TrainedModel
    from grpo_core.policies.trained.settings import TrainingChoice

_PIPELINE = "GlmImagePipeline"


class GlmImageFamily(PolicyFamily):
    """GLM-Image."""

    modality = "image"
    trained = TRAINED
    settings_class = GlmImageSettings

    def policy_class(self) -> "type[GlmImagePolicy]":
        """Return the class of its policies."""
        from grpo_core.policies.glm_image.policy import GlmImagePolicy

        return GlmImagePolicy

    def parts(self, model: str) -> Parts:
        """Return the networks, which are the same in each of its models."""
        return PARTS

    def build_on_meta(self, model: str, part: str) -> Any:
        """Build a network on the meta device."""
        from grpo_core.policies.glm_image.loading import configs_folder
        from grpo_core.policies.pipeline_loading import build_on_meta

        return build_on_meta(configs_folder(model), PARTS, part)

    def train(self, stream: Stream, network: Any, choice: "TrainingChoice", model: str) -> "TrainedModel":
        """Apply the choice."""
        from grpo_core.policies.glm_image.loading import train_half

        return train_half(stream, network, choice, model, initial_state=dict)

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model of this kind."""
        super().refuse_missing(model)
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
        from grpo_core.policies.glm_image.loading import read_token_config

        grids, codes = token_grids(output, unit), read_token_config(model).vq_config.num_embeddings
        draw = random.Random(seed)
        return [draw.randrange(codes) for _ in range((grids.of_edit if edited else grids).tokens)]

    def sizes(
        self,
        model: str,
        settings: GlmImageSettings,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence[ImageSize],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count every network, and the ids and patches of the images that have most of them."""
        import grpo_core.policies.sizes as memory
        from grpo_core.policies.glm_image.loading import left_alone, read_token_config

        networks, config = {part: self.build_on_meta(model, part) for part in PARTS}, read_token_config(model)
        text, decoder = config.text_config, networks[DECODER]
        names = {
            AUTOREGRESSIVE: "autoregressive weights",
            DECODER: "decoder weights",
            VAE: "autoencoder weights",
            TEXT_ENCODER: "glyph encoder weights",
        }
        counts = {name: memory.count_parameters(networks[part]) for part, name in names.items()}
        quantization = next((choice.quantization for choice in choices.values()), None)
        quantized = count_quantized(model, PARTS, networks, quantization, left_alone)
        vae, width, blocks = networks[VAE].config, memory.hidden_width(decoder.config), memory.count_blocks(decoder)
        scale = 2 ** (len(vae.block_out_channels) - 1)
        unit = 2 * decoder.config.patch_size * scale
        grids = {size: token_grids(size, unit) for size in images or (settings.size,)}
        tokens, pixels = max(each.tokens for each in grids.values()), max(size.pixels for size in grids)
        # The decoder has four patches per large token.
        patches = 4 * max(each.large.tokens for each in grids.values())
        components: dict[Stream, memory.ComponentSizes] = {}
        if choice := choices.get("tokens"):
            trained = self.train("tokens", networks[AUTOREGRESSIVE], choice, model)
            codes = config.vq_config.num_embeddings
            components["tokens"] = memory.token_sizes(trained, text, settings, PROMPT_TOKENS, tokens, vocabulary=codes)
        if choice := choices.get("denoising"):
            trained = self.train("denoising", decoder, choice, model)
            guided, steps = 2 if settings.guidance_scale > 1 else 1, max(1, settings.sde_window_size)
            components["denoising"] = memory.ComponentSizes(trained, width, blocks, patches, passes=guided, steps=steps)
        denoises: frozenset[Phase] = frozenset({"decoding", "denoising update"})
        return memory.ModelSizes(
            networks=counts,
            quantized={names[part]: size for part, size in quantized.items()},
            needed={
                "autoregressive weights": frozenset({"sampling", "tokens update"}),
                "decoder weights": denoises,
                "autoencoder weights": frozenset({"decoding"}),
                "glyph encoder weights": denoises,
            },
            components=components,
            prompt=PROMPT_TOKENS,
            cached=(PROMPT_TOKENS + tokens - 1) * memory.cached_values(text),
            head=text.vision_vocab_size,
            # The passes of guidance run one after the other.
            image_values=patches * width,
            image_pixels=pixels,
            image_channels=memory.image_channels(vae),
            state_values=vae.latent_channels * pixels // scale**2,
            tokens={size: each.tokens for size, each in grids.items()},
        )


FAMILY: PolicyFamily = GlmImageFamily()
