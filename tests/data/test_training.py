"""The autoencoder with weights set by hand, what is measured of images, and the recipes of the shipped models."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import data
from data.shapes import BACKGROUNDS, Scene, all_scenes, draw
from data.tiny_glm_image.components import TinyRecipe
from data.tiny_glm_image.editing import TinyEditRecipe
from data.tiny_sd3 import TinySd3Recipe
from data.tiny_text import TinyTextRecipe
from data.tiny_vision import TinyVisionRecipe
from data.training import build_cell_autoencoder, measure_images, read_scene


@pytest.mark.parametrize("levels", [1, 4])
def test_a_latent_is_the_mean_of_its_square_and_is_painted_flat(levels: int) -> None:
    vae, side = build_cell_autoencoder(levels=levels, sample_size=64), 2 ** (levels - 1)
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A group norm is hardest to pin where an image is flat.
    pixels[3] = 1.0
    means = pixels.unflatten(3, (-1, side)).unflatten(2, (-1, side)).mean((3, 5))
    painted = means.repeat_interleave(side, 2).repeat_interleave(side, 3)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        sampled = posterior.sample(torch.Generator().manual_seed(0))
        for latents in (posterior.mode(), sampled):
            torch.testing.assert_close(latents, means, atol=1e-4, rtol=0)
        torch.testing.assert_close(vae.decode(posterior.mode()).sample, painted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scene", all_scenes()[::37])
def test_a_noisy_image_is_read_as_its_scene(scene: Scene) -> None:
    noise = np.random.default_rng(0).normal(scale=12, size=(64, 64, 3))
    noisy = np.clip(np.asarray(draw(scene)) + noise, 0, 255).astype(np.uint8)
    assert read_scene(Image.fromarray(noisy)) == scene


@pytest.mark.parametrize(
    ("name", "recipe", "most_bytes"),
    [
        ("tiny-glm-image", TinyRecipe(), 5_000_000),
        ("tiny-glm-image-edit", TinyEditRecipe(), 5_000_000),
        ("tiny-sd3", TinySd3Recipe(), 6_000_000),
        ("tiny-text", TinyTextRecipe(), 2_000_000),
        ("tiny-vision", TinyVisionRecipe(), 1_500_000),
    ],
)
def test_a_shipped_model_is_small_and_names_the_recipe_of_the_source(name: str, recipe: Any, most_bytes: int) -> None:
    folder = Path(data.__file__).parent / "models" / name
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= most_bytes
    assert json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["recipe"] == asdict(recipe)
    assert not [file for file in folder.rglob("*.json") if b'_name_or_path": "/' in file.read_bytes()]


def test_each_share_counts_its_own_mistake() -> None:
    scene = Scene("red", "square", "top left", "white")
    shown = [
        scene,
        replace(scene, color="blue"),
        replace(scene, shape="circle"),
        replace(scene, position="center"),
        replace(scene, background="black", position="center"),
    ]
    measured = measure_images([draw(each) for each in shown], [scene] * 5, group_size=5)
    assert (measured.images, measured.color, measured.shape) == (5, 0.8, 0.8)
    assert (measured.position, measured.background) == (0.6, 0.8)


def test_similarity_is_averaged_and_spread_within_a_caption() -> None:
    """A square of 4 x 4 cells, and none: R² is 1 and 0; an image of one colour cannot explain any variance."""
    scene = Scene("red", "square", "top left", "white")
    plain = Image.new("RGB", (64, 64), BACKGROUNDS["white"])
    exact, empty = (
        measure_images([draw(scene)] * 2, [scene] * 2, group_size=2),
        measure_images([plain] * 2, [scene] * 2, group_size=2),
    )
    both = measure_images([draw(scene), plain], [scene] * 2, group_size=2)
    assert (exact.r2, empty.r2, both.r2) == (1.0, 0.0, 0.5)
    assert both.psnr == pytest.approx((exact.psnr + empty.psnr) / 2)
    assert exact.ssim_group_std == 0.0
    assert both.ssim_group_std == pytest.approx((exact.ssim - empty.ssim) / 2**0.5)
