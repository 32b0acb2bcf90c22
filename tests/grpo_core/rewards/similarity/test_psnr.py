import math

import pytest
from PIL import Image

from grpo_core.rewards.similarity.psnr import PsnrReward
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def test_by_hand() -> None:
    red = Image.new("RGB", (32, 32), (255, 0, 0))
    scores = PsnrReward().score(make_batch([flat(51), red, flat(255)], [flat(0)] * 3))
    # MSE 0.2^2, 1/3 and 1.
    for score, decibels in zip(scores, (13.9794000867, 4.7712125472, 0.0), strict=True):
        assert score.raw == pytest.approx(decibels, abs=1e-5)
        assert score.value == pytest.approx(decibels / 50, abs=1e-6)


def test_identical_images_reach_the_floor_of_the_error() -> None:
    (score,) = PsnrReward().score(make_batch([noise(0, 9, 7)], [noise(0, 9, 7)]))
    assert score.raw == pytest.approx(100.0)
    assert score.value == 1.0


def test_one_level_of_one_channel_of_one_pixel_counts() -> None:
    image = flat(100, 64, 64)
    image.putpixel((5, 5), (100, 101, 100))
    (score,) = PsnrReward().score(make_batch([image], [flat(100, 64, 64)]))
    assert score.raw == pytest.approx(-10 * math.log10((1 / 255) ** 2 / (3 * 64 * 64)), abs=1e-3)


def test_scale_setting() -> None:
    batch = make_batch([flat(51)], [flat(0)])
    assert PsnrReward(full_scale_db=20).score(batch)[0].value == pytest.approx(13.9794 / 20, abs=1e-5)
    assert PsnrReward(full_scale_db=10).score(batch)[0].value == 1.0
