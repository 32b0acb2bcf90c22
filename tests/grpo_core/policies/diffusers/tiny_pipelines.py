"""Tiny pipelines of every class that is tried, on disk, policies over them, and requests."""

import inspect
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from grpo_core.collect import collect_rollouts
from grpo_core.pipeline_files import INDEX_FILE
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.trained.lora_and_full import LoraModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from tests.grpo_core.policies.denoising.tiny_pipelines import GUIDANCE, disturb
from tests.grpo_core.policies.diffusers import tiny_builders as build

SavedFolder = Callable[[str], Path]
SharedPolicy = Callable[[str], DiffusersPolicy]
EDIT_PROMPTS = ("make it red", "let a much larger green square stand next to the ring")


def save(name: str, folder: Path) -> Path:
    """Write one of these pipelines as `save_pretrained` writes it."""
    torch.manual_seed(2)
    pipeline = MAKE[name]()
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.apply(_spread)
    pipeline.save_pretrained(folder)
    return folder


def without(folder: Path, target: Path, *parts: str) -> Path:
    """Copy a saved pipeline as `save_pretrained` writes one whose parts are None."""
    shutil.copytree(folder, target, ignore=lambda _, names: set(names) & set(parts))
    index = json.loads((target / INDEX_FILE).read_text())
    (target / INDEX_FILE).write_text(json.dumps(index | {part: [None, None] for part in parts}))
    return target


def saved_once(parent: Path) -> SavedFolder:
    """Return what finds the folder of a pipeline by its name, which is saved below `parent` once and never changed."""
    return cache(lambda name: save(name, parent / name))


def loaded_once(saved: SavedFolder) -> SharedPolicy:
    """Return what finds a policy over a saved pipeline, with its settings; its weights are never changed."""
    policy = cache(lambda name: load(saved(name), settings(name)))

    def find(name: str) -> DiffusersPolicy:
        found = policy(name)
        found.sample_with(settings(name))
        return found

    return find


def _spread(module: nn.Module) -> None:
    """Make embeddings differ enough that prompts matter."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)


def load(
    folder: Path,
    chosen: DiffusersSettings,
    *,
    lora: bool = True,
    checkpointing: bool = False,
    disturbed: bool = True,
    **options: Any,
) -> DiffusersPolicy:
    """Return a policy; disturbed: its adapters are away from zero, so that it is not its reference."""
    choice = TrainingChoice(
        LoraSettings(rank=4, alpha=8) if lora else None,
        reference="none" if lora else "device",
        gradient_checkpointing=checkpointing,
    )
    policy = DiffusersPolicy.load(str(folder), chosen, {"denoising": choice}, **options)
    trained = policy.denoising.trained
    if isinstance(trained, LoraModel) and disturbed:
        disturb(trained)
    return policy


def request(
    prompt: str = "a red dot",
    samples: int = 3,
    *,
    window_start: int | None = 1,
    seed: int = 0,
    size: Any = None,
    sources: tuple[SourceImage, ...] = (),
) -> GroupRequest:
    return GroupRequest(
        prompt=prompt,
        sample_ids=tuple(f"{prompt}.s{row:02d}" for row in range(samples)),
        seeds=(0,) * samples,
        noise_seeds=tuple(seed + row for row in range(samples)),
        step_seeds=() if window_start is None else tuple(seed + 100 + row for row in range(samples)),
        size=size,
        window_start=window_start,
        sources=sources,
    )


def filling(pipeline: Any) -> int:
    """How many letters of a prompt fill a multiple of 8 ids in the template of NucleusMoEImage."""
    (ids,) = pipeline.processor(text=[pipeline._format_prompt("")])["input_ids"]
    return 8 - len(ids) % 8


def picture(width: int, height: int, seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((width, height), Image.Resampling.NEAREST)


def source(width: int = 64, height: int = 64, seed: int = 0) -> SourceImage:
    return SourceImage.of(encode_png(picture(width, height, seed)))


def edits(name: str, samples: int = 3, **options: Any) -> list[GroupRequest]:
    """Requests of two prompts, whose sources have several sizes, and where possible several numbers."""
    several = (source(64, 96, 2), source(64, 64, 3)) if name in SEVERAL else (source(64, 96, 2),)
    first, second = EDIT_PROMPTS
    return [
        request(first, samples, sources=(source(96, 64, 1),), **options),
        request(second, samples, sources=several, **options),
    ]


def scaled(size: tuple[int, int]) -> tuple[int, int]:
    """The size of as many pixels as an image of 32 x 32 has."""
    share = math.sqrt(32 * 32 / (size[0] * size[1]))
    return round(size[0] * share), round(size[1] * share)


def pixels(image: Any) -> np.ndarray:
    assert isinstance(image, Image.Image)
    return np.asarray(image).astype(int)


def sampled(policy: DiffusersPolicy, *requests: GroupRequest) -> list[RolloutGroup]:
    return list(collect_rollouts(policy, requests, prompts_per_batch=2))


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
