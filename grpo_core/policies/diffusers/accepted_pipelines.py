"""What a class of pipeline can do: of those that were tried from a table, of any other from its signature.

Any pipeline that makes images from text, or edits images by it, can be trained whose own `__call__` makes every
denoising step through its scheduler and lets everything else be given: the prompts and their source images, the size,
the first latents, and that latents are returned undecoded.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

from grpo_core.policies.diffusers.source_images import SOURCES, SourceArgument
from grpo_core.rollouts.streams import ImageSize

_NEEDED = ("prompt", "height", "width", "num_inference_steps", "generator", "latents", "output_type")
_GUIDANCE = ("guidance_scale", "true_cfg_scale")
_OTHER_INPUTS = (
    *("control_image", "mask", "mask_image", "masked_image_latents", "video", "num_frames", "prior_token_ids"),
)

_SWITCHED_OFF = ("use_pe", "enable_prompt_rewrite", "use_resolution_binning", "_auto_resize")
"""Arguments that let a pipeline replace what it was given: its prompt by that of an unseeded language model, so that
images would be trained at another prompt than they were drawn for; its size by the nearest in a list."""

_SPATIAL_LATENTS = frozenset({"Flux2Pipeline", "Flux2KleinPipeline"})
"""Classes whose call takes latents [rows, C, h, w] and gives its scheduler [rows, h w, C]."""


@dataclass(frozen=True)
class PipelineClass:
    """One class of pipeline.

    Attributes:
        call: default of each argument of its `__call__`; of a class in TRIED, of those that settings give alone.
        packs: whether two by two latents become one position of the transformer, outside of it.
        no_guidance: highest scale that is no classifier-free guidance: 1 where predictions are interpolated, 0 where
            their difference is added.
        longest_prompt: largest `max_sequence_length` that it takes; None: any, or not known.
        switched_off: arguments of its `__call__` that are passed as False, whatever their defaults.
        takes_area: whether its `max_area` in pixels overrides the size.
        spatial_latents: whether its `latents` are [rows, C, h, w] where its scheduler sees [rows, h w, C].
        sources: how it takes the source images of a prompt; None: it makes images from text alone.
        can_lack: parts that its constructor wants and its call does without.
        problem: why its denoising cannot be trained, as a sentence; None if it can.
    """

    call: Mapping[str, object]
    packs: bool = False
    no_guidance: int = 1
    longest_prompt: int | None = None
    switched_off: tuple[str, ...] = ()
    takes_area: bool = False
    spatial_latents: bool = False
    sources: SourceArgument | None = None
    can_lack: tuple[str, ...] = ()
    problem: str | None = None

    def fixed_arguments(self, size: ImageSize) -> dict[str, object]:
        """Return the arguments that every call for images of this size is given."""
        fixed: dict[str, object] = dict.fromkeys(self.switched_off, False)
        return fixed | {"max_area": size.pixels} if self.takes_area else fixed


def _tried(guidance: float | None, length: int | None = None, **differing: Any) -> PipelineClass:
    """Describe a class with classifier-free guidance, a negative prompt and a length of prompts."""
    call = {"guidance_scale": guidance, "negative_prompt": None, "max_sequence_length": length}
    return PipelineClass(call | differing.pop("call", {}), **differing)


_FLUX = _tried(3.5, 512, call={"true_cfg_scale": 1.0}, packs=True, longest_prompt=512)
_FLUX_2 = PipelineClass({"guidance_scale": 4.0, "max_sequence_length": 512}, packs=True, spatial_latents=True)
_QWEN_IMAGE = _tried(None, 512, call={"true_cfg_scale": 4.0}, packs=True, longest_prompt=1024)
_T5_OF_SD3 = ("text_encoder_3", "tokenizer_3")
_Z_IMAGE = _tried(5.0, 512, no_guidance=0)

_CLASSES: Mapping[str, PipelineClass] = MappingProxyType(
    {
        "AuraFlowPipeline": _tried(3.5, 256),
        "BriaFiboPipeline": _tried(5, 3000, packs=True, longest_prompt=3000),
        "BriaPipeline": _tried(5, 128, packs=True, longest_prompt=512),
        "ChromaPipeline": _tried(5.0, 512, packs=True, longest_prompt=512),
        "CogView4Pipeline": _tried(5.0, 1024),
        "ErnieImagePipeline": PipelineClass({"guidance_scale": 4.0, "negative_prompt": ""}, switched_off=("use_pe",)),
        "Flux2KleinPipeline": _FLUX_2,
        "Flux2Pipeline": _FLUX_2,
        "FluxKontextPipeline": replace(_FLUX, switched_off=("_auto_resize",), takes_area=True),
        "FluxPipeline": _FLUX,
        "Krea2Pipeline": _tried(4.5, 512, packs=True, no_guidance=0),
        "Lumina2Pipeline": _tried(4.0, 256, longest_prompt=512),
        "LuminaPipeline": _tried(4.0, 256),
        "NucleusMoEImagePipeline": _tried(4.0, packs=True),
        "OvisImagePipeline": _tried(5.0, 256, call={"negative_prompt": ""}, packs=True, longest_prompt=256),
        "QwenImageEditPipeline": _QWEN_IMAGE,
        "QwenImageEditPlusPipeline": _QWEN_IMAGE,
        "QwenImagePipeline": _QWEN_IMAGE,
        "SanaPipeline": _tried(4.5, 300, call={"negative_prompt": ""}, switched_off=("use_resolution_binning",)),
        "StableDiffusion3Pipeline": _tried(7.0, 256, longest_prompt=512, can_lack=_T5_OF_SD3),
        "ZImageOmniPipeline": _Z_IMAGE,
        "ZImagePipeline": _Z_IMAGE,
    }
)

TRIED: Mapping[str, PipelineClass] = MappingProxyType(
    {name: replace(each, sources=SOURCES.get(name)) for name, each in _CLASSES.items()}
)
"""Classes of diffusers of which a tiny pipeline with random weights was trained; they are known without an import."""


_KNOWN_PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "Ideogram4Pipeline": (
            "Its text encoders cannot be called without a grid, so its prompts cannot be encoded once."
        ),
        "PRXPixelPipeline": "Its call fails with two prompts and guidance.",
    }
)
"""Of classes whose signature fits and whose tiny pipeline failed."""


@cache
def find_pipeline_class(name: str) -> PipelineClass | None:
    """Find a class of pipeline in the installed diffusers; None if it has none of this name.

    A class outside of TRIED is imported with its libraries, which takes seconds.
    """
    if name in TRIED:
        return TRIED[name]
    import diffusers

    found = getattr(diffusers, name, None)
    is_pipeline = isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)
    return describe_class(found) if is_pipeline else None


def describe_class(pipeline: Any) -> PipelineClass:
    """Describe an imported class by its signatures and attributes."""
    parameters = inspect.signature(pipeline.__call__).parameters
    call = {name: each.default for name, each in list(parameters.items())[1:]}
    return PipelineClass(
        call=call,
        packs=hasattr(pipeline, "_pack_latents"),
        no_guidance=0 if _guides_below_one(pipeline) else 1,
        switched_off=tuple(each for each in _SWITCHED_OFF if each in call),
        takes_area="max_area" in call,
        spatial_latents=pipeline.__name__ in _SPATIAL_LATENTS,
        sources=_sources(pipeline, call),
        problem=_KNOWN_PROBLEMS.get(pipeline.__name__) or _problem(pipeline, call),
    )


def _sources(pipeline: Any, call: Mapping[str, object]) -> SourceArgument | None:
    if "image" not in call:
        return None
    return SOURCES.get(pipeline.__name__) or SourceArgument(required=not _makes_images_from_text(pipeline))


def _guides_below_one(pipeline: Any) -> bool:
    """Return whether a scale of 1/2 is guidance."""
    guides = getattr(pipeline, "do_classifier_free_guidance", None)
    try:
        return isinstance(guides, property) and bool(guides.__get__(SimpleNamespace(_guidance_scale=0.5)))
    except AttributeError:
        # It also depends on the model, which may have been distilled.
        return False


def _problem(pipeline: Any, call: Mapping[str, object]) -> str | None:
    if missing := [each for each in _NEEDED if each not in call]:
        return f"Its call takes no {', '.join(missing)}."
    if other := [each for each in _OTHER_INPUTS if each in call]:
        return f"It needs more than a prompt and source images: its call takes {', '.join(other)}."
    if "strength" in call:
        return "It starts from its image with noise in it, and not from noise."
    if "image" in call and "num_images_per_prompt" not in call:
        return "Its call takes an image and no num_images_per_prompt."
    if not any(each in call for each in _GUIDANCE):
        return "Its guidance is not an argument of its call."
    parts = inspect.signature(pipeline.__init__).parameters
    if missing := [each for each in ("scheduler", "transformer") if each not in parts]:
        return f"It has no {' and no '.join(missing)}."
    if not hasattr(pipeline, "encode_prompt"):
        return "It does not encode its prompts by a method encode_prompt, so its text encoders would run in each pass."
    outputs = [each for name, each in vars(inspect.getmodule(pipeline)).items() if name.endswith("Output")]
    if not any("images" in getattr(each, "__dataclass_fields__", {}) for each in outputs):
        return "Its call does not return images."
    if "init_noise_sigma" in inspect.getsource(pipeline):
        return "It asks its scheduler for init_noise_sigma, which schedulers of flow matching do not have."
    # The function below torch.no_grad() is the one that is called with gradients.
    if not hasattr(vars(pipeline).get("__call__"), "__wrapped__"):
        return "Its call cannot run with gradients: it is not its own, decorated with torch.no_grad()."
    return None


def _makes_images_from_text(pipeline: Any) -> bool:
    """Return whether diffusers' AutoPipelineForText2Image can choose the class."""
    from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING

    return pipeline in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()
