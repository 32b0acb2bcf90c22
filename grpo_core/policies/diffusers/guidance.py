"""How a pipeline is told its guidance: by which argument, and with which negative prompt."""

from typing import Any

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline
from grpo_core.policies.diffusers.settings import DiffusersSettings

EMPTY_NEGATIVE_PROMPT = " "
"""Stands for no negative prompt where a pipeline skips its guidance without one; Qwen-Image's makers use it."""


def call_settings(pipeline: SavedPipeline, settings: DiffusersSettings) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the settings give: guidance and lengths of prompts.

    A guidance scale means what diffusers makes of it: the embedded guidance of a distilled model, the true
    classifier-free guidance of pipelines that have both, or classifier-free guidance.

    Raises:
        InputError: guidance that the model was distilled to do without, or a setting that its pipeline does not have.
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
