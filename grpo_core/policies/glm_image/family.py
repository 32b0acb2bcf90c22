"""GLM-Image as a kind of policy."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from grpo_core.policies.estimate import (
    MemoryEstimate,
    MemoryPart,
    ModelEstimate,
    TransformerEstimate,
    Workload,
    count_parameters,
)
from grpo_core.policies.family import PolicyFamily
from grpo_core.policies.glm_image.folder import read_pixel_unit, refuse_missing_folder
from grpo_core.policies.glm_image.settings import GlmImageSettings, token_grids
from grpo_core.policies.trained import TrainingChoice
from grpo_core.records import Modality

if TYPE_CHECKING:
    from grpo_core.policies.glm_image.architecture import Components
    from grpo_core.policies.glm_image.policy import GlmImagePolicy

PROMPT_TOKENS = 256
"""Assumed number of ids of the longest prompt of a batch, grid tags included."""


class GlmImageFamily:
    """GLM-Image as a PolicyFamily; the models' libraries are imported on first use, because that takes seconds."""

    modality: Modality = "image"

    def settings(self, values: Mapping[str, Any]) -> GlmImageSettings:
        """Return the sampling settings from a configuration section or a stored row."""
        names = {field.name for field in fields(GlmImageSettings)}
        return GlmImageSettings(**{name: value for name, value in values.items() if name in names})

    def load(
        self,
        model: str,
        settings: GlmImageSettings,
        choice: TrainingChoice,
        *,
        dtype: torch.dtype,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> "GlmImagePolicy":
        """Load a model by folder or hub name."""
        from grpo_core.policies.glm_image.policy import GlmImagePolicy

        return GlmImagePolicy.load(model, settings, choice, dtype=dtype, device=device, autocast=autocast)

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model of this kind."""
        refuse_missing_folder(model)

    def refuse_unusable(self, model: str, settings: GlmImageSettings) -> None:
        """Raise InputError if the model cannot generate images of this size; a model without local files passes."""
        unit = read_pixel_unit(model)
        if unit is not None:
            token_grids(settings.height, settings.width, unit)

    def refuse_prompts(self, model: str, settings: GlmImageSettings, prompts: Sequence[str]) -> None:
        """Raise InputError if a prompt contains the model's reserved tags."""
        from grpo_core.policies.glm_image.loading import refuse_unusable_prompts

        refuse_unusable_prompts(model, prompts)

    def refuse_choice(self, model: str, choice: TrainingChoice) -> None:
        """Raise InputError if the choice matches nothing in the model, which is built on the meta device."""
        from grpo_core.policies.glm_image.architecture import build_on_meta, find_configs
        from grpo_core.policies.glm_image.policy import train_token_model

        train_token_model(build_on_meta(find_configs(model)).autoregressive, choice, model, initial_state=dict)

    def estimate(
        self, model: str, settings: GlmImageSettings, choice: TrainingChoice, workload: Workload
    ) -> ModelEstimate:
        """Estimate the GPU memory and disk space that the model needs; nothing is loaded."""
        from grpo_core.policies.glm_image.architecture import build_on_meta, find_configs
        from grpo_core.policies.glm_image.policy import train_token_model

        configs = find_configs(model)
        networks = build_on_meta(configs)
        trained = train_token_model(networks.autoregressive, choice, model, initial_state=dict)
        text = configs.autoregressive.text_config
        transformer = TransformerEstimate(trained, choice, workload, text, norms=4)
        unit = 2 * networks.decoder.config.patch_size * 2 ** (len(networks.vae.config.block_out_channels) - 1)
        tokens = token_grids(settings.height, settings.width, unit).tokens
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
            *(
                MemoryPart(name, "always", n * b, f"{n / 1e9:.3g} B parameters x {b} bytes")
                for name, n in counts.items()
            ),
            *transformer.training_parts(),
            *transformer.sampling_parts(length, text.vision_vocab_size, codes),
            decoding_part(networks, settings, unit, min(settings.decode_batch_size, workload.group_size), b),
            *transformer.backward_parts(length, tokens, codes),
        ]
        counted = (
            f"token model {transformer.parameters / 1e9:.3g} B parameters, "
            f"decoder {counts['decoder weights'] / 1e9:.3g} B{transformer.adapters}; images in units of {unit} pixels"
        )
        return ModelEstimate(
            MemoryEstimate(tuple(part for part in parts if part.bytes)), transformer.checkpoint, counted
        )


def decoding_part(networks: "Components", settings: GlmImageSettings, unit: int, rows: int, b: int) -> MemoryPart:
    """Return the largest tensors of the image decoder.

    A block of the diffusion transformer has about 16 tensors of [rows, patches, hidden], four patches per large token;
    the passes of guidance run one after the other. The autoencoder, one image at a time, has about 4 tensors of
    [channels, height, width] at full resolution and the width of its block before the last.
    """
    decoder, widths = networks.decoder.config, networks.vae.config.block_out_channels
    patches = 4 * token_grids(settings.height, settings.width, unit).large.tokens
    denoising = 16 * rows * patches * decoder.num_attention_heads * decoder.attention_head_dim * b
    autoencoder = 4 * widths[min(1, len(widths) - 1)] * settings.height * settings.width * b
    what = f"{settings.height}x{settings.width}: a decoder block for {rows} images, or the autoencoder for one"
    return MemoryPart("decoding", "decoding", max(denoising, autoencoder), what)


FAMILY: PolicyFamily = GlmImageFamily()
