"""The tiny GLM-Image that is shipped: small, drawn from its recipe, and worth training."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline

import data
from data.codebook import CODEBOOK_SIZE, decode_tokens
from data.shapes import split_scenes
from data.tiny_glm_image import TinyRecipe, evaluate_tiny_model
from data.tiny_glm_image.evaluation import sample_images
from grpo_core.policies.glm_image.decoding import decode_group
from grpo_core.policies.glm_image.loading import load_pipeline

FOLDER = Path(data.__file__).parent / "models" / "tiny-glm-image"


@pytest.fixture(scope="module")
def pipeline() -> GlmImagePipeline:
    return load_pipeline(str(FOLDER), dtype=torch.float32, device=torch.device("cpu"))


def test_it_is_small_and_names_the_recipe_of_the_source() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 5_000_000
    recipe = json.loads((FOLDER / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["recipe"] == asdict(TinyRecipe())


def test_heldout_captions_are_understood_and_there_is_room_to_get_better() -> None:
    recipe = TinyRecipe()
    _, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    report = evaluate_tiny_model(FOLDER, heldout[::3], temperature=1.0, group_size=4)
    assert report.color >= 0.8
    assert report.background >= 0.9
    assert report.position >= 0.8
    assert report.shape >= 0.5
    assert 0.5 <= report.ssim <= 0.85
    assert report.ssim_group_std >= 0.05


@pytest.mark.parametrize(("guidance_scale", "steps"), [(1.0, 4), (1.0, 8), (1.5, 4)])
@pytest.mark.parametrize("prompt", ["a red circle", 'a sign that says "Hello World"'])
def test_decoder_draws_any_tokens_as_flat_cells(
    pipeline: GlmImagePipeline, guidance_scale: float, steps: int, prompt: str
) -> None:
    tokens = torch.randint(CODEBOOK_SIZE, (4, 64), generator=torch.Generator().manual_seed(0))
    prior = tokens.view(-1, 8, 8).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    images = decode_group(
        pipeline,
        prompt,
        prior,
        height=64,
        width=64,
        noise_seeds=[1, 2, 3, 4],
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
    )
    drawn = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    cells = (decode_tokens(tokens).permute(0, 2, 3, 1).numpy() + 1) / 2
    assert np.square(drawn - cells.repeat(8, axis=1).repeat(8, axis=2)).mean() < 0.01


@pytest.mark.parametrize("prompt", ["一只猫", "a sign that says 'OPEN' 🙂", "Photograph of a lighthouse, 35mm"])
def test_unseen_text_gives_a_image(prompt: str) -> None:
    (image,) = sample_images(FOLDER, [prompt], group_size=1, temperature=1.0, seed=0)
    assert image.size == (64, 64)
    assert np.isfinite(np.asarray(image, dtype=np.float32)).all()
