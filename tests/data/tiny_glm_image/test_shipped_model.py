"""The shipped tiny GLM-Image is small, follows the source's recipe, and leaves room to improve."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline

from data.shapes import CODEBOOK_SIZE, decode_tokens, split_scenes
from data.tiny_glm_image import TinyRecipe, evaluate_tiny_model
from grpo_core.policies.glm_image.decoding import decode_group
from tests.tiny_policy import MODEL


def test_it_is_small_and_names_the_recipe_of_the_source() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= 5_000_000
    recipe = json.loads((MODEL / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["recipe"] == asdict(TinyRecipe())


def test_heldout_captions_are_understood_and_there_is_room_to_improve() -> None:
    recipe = TinyRecipe()
    _, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    report = evaluate_tiny_model(MODEL, heldout[::3], temperature=1.0, group_size=4)
    assert report.color >= 0.8
    assert report.background >= 0.9
    assert report.position >= 0.8
    assert report.shape >= 0.5
    assert 0.5 <= report.ssim <= 0.85
    assert report.ssim_group_std >= 0.05


@pytest.mark.parametrize(("guidance_scale", "steps"), [(1.0, 4), (1.0, 8), (1.5, 4)])
@pytest.mark.parametrize("prompt", ["a red circle", 'a sign that says "Hello World"'])
def test_decoder_draws_any_tokens_as_flat_cells(
    shipped_pipeline: GlmImagePipeline, guidance_scale: float, steps: int, prompt: str
) -> None:
    tokens = torch.randint(CODEBOOK_SIZE, (4, 64), generator=torch.Generator().manual_seed(0))
    prior = tokens.view(-1, 8, 8).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    images = decode_group(
        shipped_pipeline,
        prompt,
        prior,
        height=64,
        width=64,
        noise_seeds=[1, 2, 3, 4],
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
    )
    decoded = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    cells = (decode_tokens(tokens).permute(0, 2, 3, 1).numpy() + 1) / 2
    assert np.square(decoded - cells.repeat(8, axis=1).repeat(8, axis=2)).mean() < 0.01
