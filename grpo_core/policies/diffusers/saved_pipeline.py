"""The files of a saved pipeline, its sampling settings, the image sizes that it generates, and how it is guided."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Annotated, Any

from pydantic import PositiveInt

from grpo_core.errors import InputError
from grpo_core.pipeline_files import (
    INDEX_FILE,
    find_model_file,
    pipeline_parts,
    read_pipeline_file,
    refuse_missing_parts,
)
from grpo_core.policies.denoising.settings import SCHEDULER, DenoisingSettings, refuse_scheduler
from grpo_core.policies.diffusers.accepted_pipelines import PipelineClass, find_pipeline_class
from grpo_core.rollouts.streams import ImageSize, nearest_multiple
from grpo_core.settings import ImageSettings
from grpo_core.uses import Uses


@dataclass(frozen=True, kw_only=True)
class DiffusersSettings(ImageSettings, DenoisingSettings):
    """How images are sampled.

    Attributes:
        max_sequence_length: longest prompt in ids of the text encoder; None: the pipeline's own.
        negative_prompt: of the unconditional pass, with guidance; None: the pipeline's own.
    """

    max_sequence_length: PositiveInt | None = None
    negative_prompt: Annotated[str | None, Uses.NOTHING] = None


_PLACE = "policy.model"


@dataclass(frozen=True)
class SavedPipeline:
    """A saved pipeline whose denoising can be trained.

    Attributes:
        folder: of its configuration files.
        parts: library and class of each of its parts, by name.
        transformer: configuration of the denoising model.
        vae: configuration of the autoencoder; empty for a pipeline without one.
        is_distilled: trained to need no classifier-free guidance, by its own index.
        fewest_steps: that its scheduler can denoise in.
    """

    folder: Path
    class_name: str
    pipeline_class: PipelineClass
    parts: Mapping[str, tuple[str, str]]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    is_distilled: bool
    fewest_steps: int = 1

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input of the model, which was distilled from one with guidance."""
        return bool(self.transformer.get("guidance_embeds"))

    @property
    def vae_scale(self) -> int | None:
        """Pixels along one side of a latent; None for an autoencoder whose configuration does not say it plainly."""
        if not self.vae:
            return 1
        if "spatial_compression_ratio" in self.vae:
            return int(self.vae["spatial_compression_ratio"])
        if "temperal_downsample" in self.vae:
            return int(2 ** len(self.vae["temperal_downsample"]))
        names = ("encoder_block_out_channels", "block_out_channels")
        widths = next((self.vae[name] for name in names if name in self.vae), None)
        return None if widths is None else int(2 ** (len(widths) - 1))

    @property
    def pixel_unit(self) -> int | None:
        """Pixels along one side of a position of the transformer; None where the configuration does not say it."""
        patch = self.transformer.get("all_patch_size", self.transformer.get("patch_size"))
        if self.pipeline_class.packs:
            patch = 2
        elif isinstance(patch, list):
            patch = max(patch)
        scale = self.vae_scale
        return None if scale is None or not isinstance(patch, int) else scale * patch

    @property
    def positions_per_side(self) -> int | None:
        """Length of the transformer's table of positions along one side of an image; None for one without a table."""
        found, name = self.transformer, self.parts["transformer"][1]
        if "axes_lens" in found:
            # The first axis is the prompt's.
            return int(min(found["axes_lens"][1:]))
        if name == "AuraFlowTransformer2DModel":
            return isqrt(found["pos_embed_max_size"])
        # Other classes have the setting, and rotary positions of any length.
        table = name in ("SD3Transformer2DModel", "CogView3PlusTransformer2DModel")
        return found.get("pos_embed_max_size") if table else None

    def patches(self, size: ImageSize) -> int:
        """Return the positions of an image; in patches of 16 pixels where the configuration does not say it."""
        unit = self.pixel_unit or 16
        return -(-size.height // unit) * -(-size.width // unit)

    def latent_values(self, size: ImageSize) -> int | None:
        """Return how many numbers an image's latents are; None where the configuration does not say it."""
        scale, channels = self.vae_scale, self.vae.get("latent_channels", self.vae.get("z_dim"))
        if scale is None or not isinstance(channels, int):
            return None
        return channels * (size.height // scale) * (size.width // scale)


def read_saved_pipeline(model: str) -> SavedPipeline | None:
    """Read a pipeline's configuration files, of a hub name in the local cache; None if they are not on this machine.

    InputError if a file is damaged, or the pipeline or its scheduler cannot be trained.
    """
    index = find_model_file(model, INDEX_FILE)
    return None if index is None else _read(model, index.parent)


def _read(model: str, folder: Path) -> SavedPipeline:
    index = read_pipeline_file(model, folder / INDEX_FILE)
    described = _usable_class(model, index.get("_class_name"))
    parts = pipeline_parts(index)
    name = parts.get("scheduler", ("", "no scheduler"))[1]
    scheduler = read_pipeline_file(model, folder / "scheduler" / "scheduler_config.json") if name == SCHEDULER else {}
    refuse_scheduler(model, name, scheduler)
    if parts.get("transformer", ("", ""))[0] != "diffusers":
        hint = f"Its {INDEX_FILE} has no transformer of diffusers, so there is nothing to train."
        raise InputError(_PLACE, model, hint)
    refuse_missing_parts(model, parts)
    return SavedPipeline(
        folder=folder,
        class_name=index["_class_name"],
        pipeline_class=described,
        parts=parts,
        transformer=read_pipeline_file(model, folder / "transformer" / "config.json"),
        vae=read_pipeline_file(model, folder / "vae" / "config.json") if "vae" in parts else {},
        is_distilled=bool(index.get("is_distilled")),
        fewest_steps=2 if scheduler.get("shift_terminal") else 1,
    )


def _usable_class(model: str, name: object) -> PipelineClass:
    described = find_pipeline_class(name) if isinstance(name, str) else None
    if described is None:
        hint = f"It is a {name}, which the installed diffusers does not have; code of a model's own is not run."
        raise InputError(_PLACE, model, hint)
    if described.problem is not None:
        hint = (
            f"It is a {name}. {described.problem} Give a text-to-image pipeline such as StableDiffusion3Pipeline, or "
            "set policy.kind if it is another kind."
        )
        raise InputError(_PLACE, model, hint)
    return described


def refuse_size(pipeline: SavedPipeline, size: ImageSize) -> None:
    """Raise InputError for an image size that is no multiple of the pipeline's unit, or has more positions than it."""
    unit, positions = pipeline.pixel_unit, pipeline.positions_per_side
    if unit is None:
        return
    if positions is not None and max(size) > positions * unit:
        hint = f"The transformer has positions for images of up to {positions * unit} pixels a side; give at most that."
        raise InputError("rollout.width and height", str(size), hint)
    nearest = nearest_multiple(size, unit)
    if size != nearest:
        hint = f"This model generates images in units of {unit} pixels; the nearest size is {nearest}."
        raise InputError("rollout.width and height", str(size), hint)


def refuse_steps(pipeline: SavedPipeline, steps: int) -> None:
    """Raise InputError for fewer denoising steps than the scheduler can take."""
    if steps < pipeline.fewest_steps:
        hint = f"Its scheduler stretches the steps to its shift_terminal; give at least {pipeline.fewest_steps}."
        raise InputError("rollout.num_inference_steps", steps, hint)


EMPTY_NEGATIVE_PROMPT = " "
"""Stands for no negative prompt where a pipeline skips its guidance without one; Qwen-Image's makers use it."""


def call_settings(pipeline: SavedPipeline, settings: DiffusersSettings) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the settings give: guidance and lengths of prompts.

    A guidance scale is the embedded guidance of a distilled model, the true classifier-free guidance of pipelines that
    have both, or classifier-free guidance. InputError for a setting that the model or its pipeline does not have.
    """
    call, scale = pipeline.pipeline_class.call, settings.guidance_scale
    _refuse_settings(pipeline, settings)
    arguments: dict[str, Any] = {}
    if settings.max_sequence_length is not None:
        arguments["max_sequence_length"] = settings.max_sequence_length
    if pipeline.embeds_guidance:
        return {**arguments, "guidance_scale": scale}
    name = "true_cfg_scale" if "true_cfg_scale" in call else "guidance_scale"
    if scale <= pipeline.pipeline_class.no_guidance:
        # A negative prompt would not be read.
        return {**arguments, name: 1.0 if name == "true_cfg_scale" else scale}
    negative = settings.negative_prompt
    if negative is None and name == "true_cfg_scale":
        negative = EMPTY_NEGATIVE_PROMPT
    return {**arguments, name: scale, **({} if negative is None else {"negative_prompt": negative})}


def passes_per_step(pipeline: SavedPipeline, settings: DiffusersSettings) -> int:
    """Return how often the denoising model computes a row in one step: twice with classifier-free guidance."""
    none = pipeline.pipeline_class.no_guidance
    return 1 if pipeline.embeds_guidance or settings.guidance_scale <= none else 2


def _refuse_settings(pipeline: SavedPipeline, settings: DiffusersSettings) -> None:
    call, name = pipeline.pipeline_class.call, pipeline.class_name
    # FLUX.1-schnell: its pipeline has both kinds of guidance, and the model takes no guidance as an input.
    needs_none = "guidance_scale" in call and call.get("true_cfg_scale") == 1.0 and not pipeline.embeds_guidance
    none = pipeline.pipeline_class.no_guidance
    if settings.guidance_scale > none and (pipeline.is_distilled or needs_none):
        hint = f"The model was distilled to need no classifier-free guidance; set it to {none}."
        raise InputError("rollout.guidance_scale", settings.guidance_scale, hint)
    if settings.negative_prompt is not None and pipeline.embeds_guidance:
        hint = "The model was distilled from one with guidance and has no unconditional pass; leave it out."
        raise InputError("rollout.negative_prompt", settings.negative_prompt, hint)
    for setting in ("negative_prompt", "max_sequence_length"):
        value = getattr(settings, setting)
        if value is not None and setting not in call:
            raise InputError(f"rollout.{setting}", value, f"The call of {name} does not take it; leave it out.")
    length, longest = settings.max_sequence_length, pipeline.pipeline_class.longest_prompt
    if length is not None and longest is not None and length > longest:
        hint = f"{name} takes at most {longest}; set that or less, or leave it out for the pipeline's own."
        raise InputError("rollout.max_sequence_length", length, hint)
