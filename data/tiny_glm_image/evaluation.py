"""Measure a saved tiny GLM-Image on held-out captions, with the same policy as in training with rewards."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from data.image_quality import ImageQuality, measure_images
from data.shapes import IMAGE_PIXELS, Scene
from grpo_core.groups import GroupRequest
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained import TrainingChoice
from grpo_core.seeds import derive_seed


def sample_images(
    folder: Path,
    prompts: Sequence[str],
    *,
    group_size: int,
    temperature: float,
    seed: int,
    num_inference_steps: int = 4,
    guidance_scale: float = 1.0,
) -> list[Image.Image]:
    """Sample `group_size` images for each prompt, siblings next to each other, with seeds derived from `seed`."""
    settings = GlmImageSettings(
        height=IMAGE_PIXELS,
        width=IMAGE_PIXELS,
        temperature=temperature,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    choice = TrainingChoice(lora=None)
    cpu = torch.device("cpu")
    policy = GlmImagePolicy.load(str(folder), settings, {"tokens": choice}, dtype=torch.float32, device=cpu)
    requests = [_request(prompt, place, group_size, seed) for place, prompt in enumerate(prompts)]
    rendered = [output for group in policy.sample(requests) for output in group.outputs]
    images = [each for each in rendered if isinstance(each, Image.Image)]
    assert len(images) == len(rendered), "the tiny model's decoder gives finite pixels"
    return images


def _request(prompt: str, place: int, group_size: int, seed: int) -> GroupRequest:
    rows = range(place * group_size, (place + 1) * group_size)
    return GroupRequest(
        prompt,
        sample_ids=tuple(str(row) for row in rows),
        seeds=tuple(derive_seed(seed, "tokens", row) for row in rows),
        noise_seeds=(derive_seed(seed, "noise", place),) * group_size,
    )


def evaluate_tiny_model(
    folder: Path, scenes: Sequence[Scene], *, temperature: float, group_size: int = 4, seed: int = 0
) -> ImageQuality:
    """Sample and measure `group_size` images for each scene's caption.

    Args:
        scenes: usually the held-out ones of :func:`data.shapes.split_scenes`.
    """
    captions = [scene.caption for scene in scenes]
    images = sample_images(folder, captions, group_size=group_size, temperature=temperature, seed=seed)
    return measure_images(images, [scene for scene in scenes for _ in range(group_size)], group_size=group_size)
