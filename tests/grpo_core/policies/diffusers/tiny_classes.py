"""Every class of pipeline that is tried: how a tiny one is made, and settings for it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest

from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import GUIDANCE
from tests.grpo_core.policies.diffusers import tiny_builders as build

# How each is made, and its class.
_TRIED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "sd3": (build.sd3, "StableDiffusion3Pipeline"),
    "flux": (build.flux, "FluxPipeline"),
    "qwen_image": (build.qwen_image, "QwenImagePipeline"),
    "z_image": (build.z_image, "ZImagePipeline"),
    "flux2": (build.flux2, "Flux2Pipeline"),
    "flux2_klein": (build.flux2_klein, "Flux2KleinPipeline"),
    "flux_kontext": (build.flux_kontext, "FluxKontextPipeline"),
    "qwen_image_edit": (build.qwen_image_edit, "QwenImageEditPipeline"),
    "qwen_image_edit_plus": (build.qwen_image_edit_plus, "QwenImageEditPlusPipeline"),
    "z_image_omni": (build.z_image_omni, "ZImageOmniPipeline"),
    "sana": (build.sana, "SanaPipeline"),
    "cogview4": (build.cogview4, "CogView4Pipeline"),
    "lumina": (build.lumina, "LuminaPipeline"),
    "bria": (build.bria, "BriaPipeline"),
    "ernie_image": (build.ernie_image, "ErnieImagePipeline"),
    "aura_flow": (build.aura_flow, "AuraFlowPipeline"),
    "bria_fibo": (build.bria_fibo, "BriaFiboPipeline"),
    "chroma": (build.chroma, "ChromaPipeline"),
    "krea2": (build.krea2, "Krea2Pipeline"),
    "lumina2": (build.lumina2, "Lumina2Pipeline"),
    "nucleus_moe": (build.nucleus_moe, "NucleusMoEImagePipeline"),
    "ovis_image": (build.ovis_image, "OvisImagePipeline"),
}
MAKE = {name: make for name, (make, _) in _TRIED.items()}
CLASSES = {name: own for name, (_, own) in _TRIED.items()}

# One of each way to guide and to pad; most tests are of these.
FAMILIES = ("sd3", "flux", "qwen_image", "z_image")

# A letter is an id, and some templates have more letters than the prompt.
LENGTHS = {
    "sd3": 32,
    "flux": 32,
    "qwen_image": 400,
    "flux2": 400,
    "sana": 200,
    "ernie_image": None,
    "qwen_image_edit": 512,
    "qwen_image_edit_plus": 512,
    "krea2": 300,
    "lumina2": 300,
    "nucleus_moe": None,
}

# Those that make no image without a source.
NEED_SOURCES = ("qwen_image_edit", "qwen_image_edit_plus")

# Those that also edit; the one of two takes one image a prompt, the other any number.
EDITS = ("flux_kontext", "flux2", "flux2_klein", *NEED_SOURCES, "z_image_omni")
SEVERAL = ("flux2", "flux2_klein", "qwen_image_edit_plus", "z_image_omni")


@contextmanager
def reduced_sources(class_name: str) -> Iterator[None]:
    """Let a pipeline that scales source images to a megapixel make them small in this context."""
    module = inspect.getmodule(getattr(diffusers, class_name))
    own = getattr(module, "calculate_dimensions", None)
    with pytest.MonkeyPatch.context() as patch:
        if own is not None:
            patch.setattr(module, "calculate_dimensions", lambda area, ratio: own(min(area, 64**2), ratio))
        yield


def settings(name: str = "sd3", **changes: Any) -> DiffusersSettings:
    """Settings for one of these; guidance is embedded or classifier-free."""
    side = 64 if name.startswith("lumina") else 32
    return DiffusersSettings(
        **{
            "height": side,
            "width": side,
            "num_inference_steps": 5,
            "guidance_scale": GUIDANCE.get(name, 4.0),
            "sde_window_range": (0, 4),
            "max_sequence_length": LENGTHS.get(name, 64),
            **changes,
        }
    )
