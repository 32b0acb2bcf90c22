"""Text-to-image pipelines of diffusers as a kind of policy."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.modality import Modality
from grpo_core.policies.diffusers.guidance import call_settings
from grpo_core.policies.diffusers.saved_pipeline import read_saved_pipeline, refuse_size
from grpo_core.policies.diffusers.settings import DiffusersSettings
from grpo_core.policies.pipeline_files import refuse_missing_folder, refuse_missing_weights
from grpo_core.policies.protocol import PolicyFamily
from grpo_core.streams import Stream

if TYPE_CHECKING:
    import torch

    from grpo_core.policies.diffusers.policy import DiffusersPolicy
    from grpo_core.policies.trained import TrainingChoice


class DiffusersFamily:
    """Pipelines of diffusers as a PolicyFamily; the models' libraries are imported on first use."""

    modality: Modality = "image"
    streams: tuple[Stream, ...] = ("denoising",)

    def settings(self, values: Mapping[str, Any]) -> DiffusersSettings:
        """Return the sampling settings from a configuration section or a stored row."""
        known = {field.name: values[field.name] for field in fields(DiffusersSettings) if field.name in values}
        if "sde_window_range" in known:
            # A table keeps it as a list.
            begin, end = known["sde_window_range"]
            known["sde_window_range"] = (begin, end)
        return DiffusersSettings(**known)

    def policy_class(self) -> "type[DiffusersPolicy]":
        """Import its libraries and return the class."""
        from grpo_core.policies.diffusers.policy import DiffusersPolicy

        return DiffusersPolicy

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no pipeline."""
        refuse_missing_folder(model)

    def refuse_unusable(self, model: str, settings: DiffusersSettings) -> None:
        """Raise InputError if the pipeline cannot be trained, or not with this size or guidance."""
        saved = read_saved_pipeline(model)
        if saved is not None:
            refuse_size(saved, settings.size)
            call_settings(saved, settings)
            refuse_missing_weights(model, saved.parts)

    def refuse_prompts(self, model: str, settings: DiffusersSettings, prompts: Sequence[str]) -> None:
        """Raise InputError if a prompt is longer than what the pipeline reads."""
        from grpo_core.policies.diffusers.prompts import refuse_cut_prompts

        saved = read_saved_pipeline(model)
        if saved is not None:
            refuse_cut_prompts(model, saved, settings, prompts)

    def save_whole(self, base: Path, weights: Mapping[Stream, Path], folder: Path, *, dtype: "torch.dtype") -> None:
        """Write the pipeline with trained weights in its transformer, and its other parts as they are."""
        from grpo_core.policies.diffusers.loading import TRANSFORMER, load_transformer
        from grpo_core.policies.trained import TrainedPart, save_pipeline

        trained = TrainedPart(weights["denoising"], lambda: load_transformer(str(base), dtype))
        save_pipeline(base, folder, {TRANSFORMER: trained})

    def check_choices(self, model: str, choices: Mapping[Stream, "TrainingChoice"]) -> tuple[str, ...]:
        """Raise InputError if a choice matches nothing in the transformer, which is built on the meta device."""
        from grpo_core.policies.diffusers.loading import build_on_meta, require_saved_pipeline, train_transformer

        saved = require_saved_pipeline(model)
        train_transformer(build_on_meta(model, saved), choices["denoising"], model, initial_state=dict)
        return ()


FAMILY: PolicyFamily = DiffusersFamily()
