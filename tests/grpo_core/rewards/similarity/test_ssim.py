import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import structural_similarity as skimage_ssim

from grpo_core.rewards.similarity.ssim import SsimReward, structural_similarity
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def skimage_valid_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of scikit-image's SSIM map where the 11x11 window lies inside the image."""
    _, ssim_map = skimage_ssim(
        a, b, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, channel_axis=2, full=True
    )
    return float(ssim_map[5:-5, 5:-5].mean())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(11, 40),
    width=st.integers(11, 40),
    mix=st.floats(0, 1),
    contrast=st.sampled_from([0.02, 0.3, 1.0]),
)
def test_agrees_with_scikit_image(seed: int, height: int, width: int, mix: float, contrast: float) -> None:
    rng = np.random.default_rng(seed)
    a = rng.random((height, width, 3)) * contrast
    b = mix * a + (1 - mix) * rng.random((height, width, 3))
    tensors = [torch.from_numpy(x).permute(2, 0, 1).unsqueeze(0).float() for x in (a, b)]
    assert structural_similarity(*tensors).item() == pytest.approx(skimage_valid_mean(a, b), abs=1e-5)


def test_flat_images_by_hand() -> None:
    # No variance: (2ab + C1) / (a^2 + b^2 + C1) with C1 = 1e-4.
    black, white, grey = flat(0), flat(255), flat(51)
    scores = SsimReward().score(make_batch([white, grey, black], [black, white, black]))
    assert scores[0].raw == pytest.approx(1e-4 / 1.0001, abs=1e-7)
    assert scores[1].raw == pytest.approx((0.4 + 1e-4) / (0.04 + 1 + 1e-4), abs=1e-5)
    assert scores[2].raw == 1.0
    assert scores[2].value == 1.0


def test_value_is_clamped_at_zero_and_raw_is_not() -> None:
    image = noise(0, 32, 32)
    inverse = image.point([255 - level for level in range(256)] * 3)
    (score,) = SsimReward().score(make_batch([image], [inverse]))
    assert score.raw is not None
    assert score.raw < -0.5
    assert score.value == 0.0


def test_half_precision_context_does_not_reach_it() -> None:
    batch = make_batch([noise(1, 32, 32)], [noise(2, 32, 32)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = SsimReward().score(batch)
    assert inside == SsimReward().score(batch)
