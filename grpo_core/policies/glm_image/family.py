"""GLM-Image as a kind of policy."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from grpo_core.policies.estimate import ModelEstimate, Workload
from grpo_core.policies.family import PolicyFamily
from grpo_core.policies.glm_image.folder import read_pixel_unit, refuse_missing_folder
from grpo_core.policies.glm_image.geometry import token_grids
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained import TrainingChoice
from grpo_core.records import Modality

if TYPE_CHECKING:
    from grpo_core.policies.glm_image.policy import GlmImagePolicy


class GlmImageFamily:
    """See PolicyFamily. The models' libraries are imported where they are needed: it takes many seconds."""

    modality: Modality = "image"

    def settings(self, values: Mapping[str, Any]) -> GlmImageSettings:
        """See PolicyFamily.settings."""
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
        """See PolicyFamily.load."""
        from grpo_core.policies.glm_image.policy import GlmImagePolicy

        return GlmImagePolicy.load(model, settings, choice, dtype=dtype, device=device, autocast=autocast)

    def refuse_missing(self, model: str) -> None:
        """See PolicyFamily.refuse_missing."""
        refuse_missing_folder(model)

    def refuse_unusable(self, model: str, settings: GlmImageSettings) -> None:
        """Raise InputError when the model cannot draw images of this size; a model that is not at hand may."""
        unit = read_pixel_unit(model)
        if unit is not None:
            token_grids(settings.height, settings.width, unit)

    def refuse_prompts(self, model: str, settings: GlmImageSettings, prompts: Sequence[str]) -> None:
        """Raise InputError when a prompt holds the model's own tags."""
        from grpo_core.policies.glm_image.loading import refuse_unusable_prompts

        refuse_unusable_prompts(model, prompts)

    def refuse_choice(self, model: str, choice: TrainingChoice) -> None:
        """See PolicyFamily.refuse_choice."""
        from grpo_core.policies.glm_image.architecture import build_on_meta, find_configs
        from grpo_core.policies.glm_image.policy import train_token_model

        train_token_model(build_on_meta(find_configs(model)).autoregressive, choice, model, initial_state=dict)

    def estimate(
        self, model: str, settings: GlmImageSettings, choice: TrainingChoice, workload: Workload
    ) -> ModelEstimate:
        """See PolicyFamily.estimate."""
        from grpo_core.policies.glm_image.architecture import find_configs
        from grpo_core.policies.glm_image.memory import checkpoint_bytes, estimate_memory
        from grpo_core.policies.glm_image.policy import LANGUAGE_MODEL_LINEARS
        from grpo_core.policies.glm_image.sizes import component_sizes

        lora = choice.lora
        sizes = component_sizes(
            find_configs(model),
            lora_rank=lora.rank if lora else None,
            lora_targets=(lora.targets or LANGUAGE_MODEL_LINEARS) if lora else None,
        )
        memory = estimate_memory(
            sizes,
            dtype=workload.dtype,
            height=settings.height,
            width=settings.width,
            group_size=workload.group_size,
            prompts_per_batch=workload.prompts_per_batch,
            decode_batch_size=settings.decode_batch_size,
            micro_batch_size=workload.micro_batch_size,
            reference_on_device=choice.reference == "device",
            gradient_checkpointing=choice.gradient_checkpointing,
            eight_bit_optimizer=workload.eight_bit_optimizer,
        )
        counted = (
            f"token model {sizes.autoregressive / 1e9:.3g} B parameters, decoder {sizes.decoder / 1e9:.3g} B"
            + (f", adapters {sizes.adapter / 1e6:.3g} M" if sizes.adapter else "")
            + f"; images in units of {sizes.unit} pixels"
        )
        return ModelEstimate(memory, checkpoint_bytes(sizes, workload.dtype), counted)


FAMILY: PolicyFamily = GlmImageFamily()
