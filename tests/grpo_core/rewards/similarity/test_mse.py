import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.metrics import mean_squared_error as skimage_mse

from grpo_core.rewards.similarity.mse import MseReward
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def test_by_hand() -> None:
    red = Image.new("RGB", (32, 32), (255, 0, 0))
    scores = MseReward().score(make_batch([flat(51), red, flat(255), flat(0)], [flat(0)] * 4))
    # 0.2^2 of 0.25; one channel of three is beyond the scale, and so is white.
    for score, mse, value in zip(scores, (0.04, 1 / 3, 1.0, 0.0), (0.84, 0.0, 0.0, 1.0), strict=True):
        assert score.raw == pytest.approx(mse, abs=1e-7)
        assert score.value == pytest.approx(value, abs=1e-6)


def test_scale_setting() -> None:
    batch = make_batch([flat(51)], [flat(0)])
    assert MseReward(full_scale=1).score(batch)[0].value == pytest.approx(0.96, abs=1e-6)
    assert MseReward(full_scale=0.05).score(batch)[0].value == pytest.approx(0.2, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 20), height=st.integers(1, 20))
def test_agrees_with_scikit_image(seed: int, width: int, height: int) -> None:
    image, target = noise(seed, width, height), noise(seed + 1, width, height)
    (score,) = MseReward().score(make_batch([image], [target]))
    assert score.raw == pytest.approx(skimage_mse(np.asarray(image) / 255, np.asarray(target) / 255), abs=1e-7)


def test_grey_is_never_beyond_the_default_scale() -> None:
    board = Image.fromarray((np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")
    (score,) = MseReward().score(make_batch([flat(128)], [board]))
    assert score.raw == pytest.approx(0.25, abs=1e-4)
