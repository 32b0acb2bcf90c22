"""Reading a scene back from an image, and the means over images."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from data.image_quality import measure_images, read_scene
from data.shapes import BACKGROUNDS, Scene, all_scenes, draw


@pytest.mark.parametrize("scene", all_scenes()[::37])
def test_a_noisy_image_is_read_as_its_scene(scene: Scene) -> None:
    noise = np.random.default_rng(0).normal(scale=12, size=(64, 64, 3))
    noisy = np.clip(np.asarray(draw(scene)) + noise, 0, 255).astype(np.uint8)
    assert read_scene(Image.fromarray(noisy)) == scene


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
