"""Measure a saved tiny SD3 on held-out captions, with diffusers alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from data.image_quality import ImageQuality, measure_images
from data.shapes import IMAGE_PIXELS, Scene
from grpo_core.seeds import derive_seed


def sample_images(
    folder: Path,
    prompts: Sequence[str],
    *,
    group_size: int,
    seed: int,
    num_inference_steps: int,
    guidance_scale: float,
) -> list[Image.Image]:
    """Sample `group_size` images for each prompt, siblings next to each other, with seeds derived from `seed`."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, trust_remote_code=False)
    pipeline.set_progress_bar_config(disable=True)
    captions = [prompt for prompt in prompts for _ in range(group_size)]
    noise = [torch.Generator().manual_seed(derive_seed(seed, "noise", row)) for row in range(len(captions))]
    images: list[Image.Image] = pipeline(
        captions,
        generator=noise,
        height=IMAGE_PIXELS,
        width=IMAGE_PIXELS,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        # The transformer has seen texts of this length alone.
        max_sequence_length=pipeline.tokenizer.model_max_length,
    ).images
    return images


def evaluate_tiny_sd3(
    folder: Path,
    scenes: Sequence[Scene],
    *,
    num_inference_steps: int,
    guidance_scale: float,
    group_size: int = 4,
    seed: int = 0,
) -> ImageQuality:
    """Sample and measure `group_size` images for each scene's caption.

    Args:
        scenes: usually the held-out ones of :func:`data.shapes.split_scenes`.
    """
    images = sample_images(
        folder,
        [scene.caption for scene in scenes],
        group_size=group_size,
        seed=seed,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    return measure_images(images, [scene for scene in scenes for _ in range(group_size)], group_size=group_size)
