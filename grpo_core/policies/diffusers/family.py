"""Pipelines of diffusers that make or edit images, as a kind of policy; what of prompts these cannot read."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.pipeline_files import Parts, find_model_file, refuse_missing_weights
from grpo_core.policies.diffusers.accepted_pipelines import TRIED
from grpo_core.policies.diffusers.saved_pipeline import (
    DiffusersSettings,
    SavedPipeline,
    call_settings,
    passes_per_step,
    read_saved_pipeline,
    refuse_size,
    refuse_steps,
)
from grpo_core.policies.diffusers.source_images import refuse_sources
from grpo_core.policies.protocol import PolicyFamily, first_numbers
from grpo_core.policies.trained.quantization import count_quantized
from grpo_core.rollouts.images import without_marks
from grpo_core.rollouts.streams import Stream

if TYPE_CHECKING:
    from grpo_core.policies.diffusers.policy import DiffusersPolicy
    from grpo_core.policies.sizes import ModelSizes, Phase
    from grpo_core.policies.trained.model import TrainedModel
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.rollouts.streams import ImageSize


def refuse_cut_prompts(model: str, saved: SavedPipeline, settings: DiffusersSettings, prompts: Sequence[str]) -> None:
    """Raise InputError for a prompt that every text encoder cuts off: two that differ only later would be one to it."""
    tokenizers = _tokenizers(model, saved)
    limits = [_limit(each, saved, settings) for each in tokenizers]
    for prompt, number in first_numbers(prompts).items():
        lengths = [len(each(prompt, truncation=False, verbose=False).input_ids) for each in tokenizers]
        if lengths and all(length > limit for length, limit in zip(lengths, limits, strict=True)):
            read = max(limits)
            hint = f"It has {min(lengths)} ids and the model reads {read} of them; shorten it"
            longer = "max_sequence_length" in saved.pipeline_class.call and not all(map(_is_of_clip, tokenizers))
            raise InputError(
                f"prompt {number}", prompt, hint + (", or set rollout.max_sequence_length." if longer else ".")
            )


def _tokenizers(model: str, saved: SavedPipeline) -> list[Any]:
    from transformers import AutoTokenizer

    found = (find_model_file(model, f"{part}/tokenizer_config.json") for part in saved.parts if "tokenizer" in part)
    return [AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False) for file in found if file is not None]


def _limit(tokenizer: Any, saved: SavedPipeline, settings: DiffusersSettings) -> int:
    """Return how many ids of a prompt are read: `max_sequence_length`, or all that CLIP has positions for."""
    own = int(tokenizer.model_max_length)
    if _is_of_clip(tokenizer):
        return own
    default = saved.pipeline_class.call.get("max_sequence_length")
    return settings.max_sequence_length or (default if isinstance(default, int) else own)


def _is_of_clip(tokenizer: Any) -> bool:
    return "CLIP" in type(tokenizer).__name__


PROMPT_TOKENS = 512
"""Assumed number of ids of a prompt where neither the settings nor the pipeline give one."""


class DiffusersFamily(PolicyFamily):
    """Pipelines of diffusers."""

    modality = "image"
    trained: Mapping[Stream, str] = MappingProxyType({"denoising": "transformer"})
    settings_class = DiffusersSettings

    def policy_class(self) -> "type[DiffusersPolicy]":
        """Return the class of its policies."""
        from grpo_core.policies.diffusers.policy import DiffusersPolicy

        return DiffusersPolicy

    def parts(self, model: str) -> Parts | None:
        """Return what its index names; None if it is not on this machine."""
        saved = read_saved_pipeline(model)
        return None if saved is None else saved.parts

    def build_on_meta(self, model: str, part: str) -> Any:
        """Build a network on the meta device."""
        from grpo_core.policies.diffusers.loading import require_saved_pipeline
        from grpo_core.policies.pipeline_loading import build_on_meta

        saved = require_saved_pipeline(model)
        return build_on_meta(saved.folder, saved.parts, part)

    def train(self, stream: Stream, network: Any, choice: "TrainingChoice", model: str) -> "TrainedModel":
        """Apply the choice."""
        from grpo_core.policies.diffusers.loading import train_transformer

        return train_transformer(network, choice, model, initial_state=dict)

    def refuse_unusable(self, model: str, settings: DiffusersSettings) -> None:
        """Raise InputError if the pipeline cannot be trained, or not with this size, guidance or number of steps."""
        saved = read_saved_pipeline(model)
        if saved is not None:
            refuse_size(saved, settings.size)
            refuse_steps(saved, settings.num_inference_steps)
            call_settings(saved, settings)
            refuse_missing_weights(model, saved.parts)
            from grpo_core.policies.diffusers.loading import absent_parts

            absent_parts(model, saved)

    def refuse_without_pull(self, model: str, settings: DiffusersSettings) -> None:
        """Raise InputError for embedded guidance: the images do not lead back to the guided velocity that made them."""
        saved = read_saved_pipeline(model)
        if saved is not None and saved.embeds_guidance and settings.guidance_scale > 1:
            hint = (
                "Distilled guidance makes images whose mean velocity is another than the model's, so matching drifts; "
                "set it to 1, or the update's kl_coef above 0."
            )
            raise InputError("rollout.guidance_scale", settings.guidance_scale, hint)

    def is_tried(self, model: str) -> bool:
        """Return whether this project's tests try pipelines of its class."""
        saved = read_saved_pipeline(model)
        return saved is not None and saved.class_name in TRIED

    def refuse_prompts(
        self,
        model: str,
        settings: DiffusersSettings,
        prompts: Sequence[str],
        images: Sequence[Sequence["ImageSize"]] = (),
    ) -> None:
        """Raise InputError if a prompt is longer, or has more or fewer source images, than what the pipeline reads."""
        saved = read_saved_pipeline(model)
        if saved is not None:
            refuse_sources(saved.class_name, saved.pipeline_class.sources, saved.pixel_unit, prompts, images)
            texts = [without_marks(prompt) for prompt in prompts] if any(images) else prompts
            refuse_cut_prompts(model, saved, settings, texts)

    def sizes(
        self,
        model: str,
        settings: DiffusersSettings,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence["ImageSize"],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Count every network of the pipeline, and the positions of the image that has most, with a source if usual."""
        import grpo_core.policies.sizes as memory
        from grpo_core.policies.diffusers.loading import TRANSFORMER, require_saved_pipeline
        from grpo_core.policies.pipeline_loading import build_on_meta, is_network

        saved = require_saved_pipeline(model)
        parts = (part for part in saved.parts if is_network(saved.parts, part))
        networks = {part: build_on_meta(saved.folder, saved.parts, part) for part in parts}
        transformer = networks[TRANSFORMER]
        counts = {f"{part} weights": memory.count_parameters(network) for part, network in networks.items()}
        quantized = count_quantized(model, saved.parts, networks, choices["denoising"].quantization)
        width, blocks = memory.hidden_width(saved.transformer), memory.count_blocks(transformer)
        patches = {size: saved.patches(size) for size in images or (settings.size,)}
        largest = max(patches, key=lambda size: patches[size])
        prompt = settings.max_sequence_length or saved.pipeline_class.call.get("max_sequence_length")
        read = prompt if isinstance(prompt, int) else PROMPT_TOKENS
        positions = patches[largest] + read
        if (sources := saved.pipeline_class.sources) is not None and sources.usual:
            positions += sources.area(largest) // (saved.pixel_unit or 16) ** 2
        trained = self.train("denoising", transformer, choices["denoising"], model)
        guided = passes_per_step(saved, settings)
        # Without noisy steps a microbatch has rows at one noise level each.
        steps = max(1, settings.sde_window_size)
        encodes: frozenset[Phase] = frozenset({"encoding"})
        denoises: frozenset[Phase] = frozenset({"decoding", "denoising update"})
        # Source images are encoded by each call.
        decodes: frozenset[Phase] = denoises if sources is not None and sources.usual else frozenset({"decoding"})
        needed = {TRANSFORMER: denoises, "vae": decodes}
        needed |= {part: encodes for part in networks if part.startswith("text_encoder")}
        return memory.ModelSizes(
            networks=counts,
            quantized={f"{part} weights": size for part, size in quantized.items()},
            needed={f"{part} weights": phases for part, phases in needed.items()},
            components={
                "denoising": memory.ComponentSizes(trained, width, blocks, positions, passes=guided, steps=steps)
            },
            prompt=read,
            image_values=guided * positions * width,
            image_pixels=largest.pixels,
            image_channels=memory.image_channels(saved.vae),
            state_values=saved.latent_values(largest),
            tokens=patches,
        )


FAMILY: PolicyFamily = DiffusersFamily()
