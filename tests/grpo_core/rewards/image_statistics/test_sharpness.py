import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from skimage.filters import laplace

from grpo_core.rewards.image_statistics.sharpness import SharpnessReward, laplacian_variance
from grpo_core.rewards.reward import Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def test_one_bright_pixel_by_hand() -> None:
    image = flat(0, 8, 8)
    image.putpixel((3, 4), (10, 10, 10))
    # The Laplacian is -40 there, 10 at its four neighbours and 0 at the other 59: mean 0, mean square 2000 / 64.
    assert SharpnessReward(half=31.25).score(make_batch([image])) == [Score(0.5, 31.25)]
    assert SharpnessReward().score(make_batch([image]))[0].value == pytest.approx(31.25 / 531.25)


def test_flat_images_and_slopes_have_none() -> None:
    # The second difference of a slope is 0 everywhere but at the border, where the filter sees its mirror image.
    slope = Image.fromarray(np.tile(np.arange(0, 200, 2, dtype=np.uint8), (100, 1))).convert("RGB")
    assert SharpnessReward().score(make_batch([flat(200), flat(9, 1, 1)])) == [Score(0.0, 0.0)] * 2
    assert laplacian_variance(slope) < 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.tuples(*[st.integers(4, 40)] * 2))
def test_agrees_with_scikit_image_inside_the_border(seed: int, size: tuple[int, int]) -> None:
    levels = np.asarray(noise(seed, *size))[:, :, :1].repeat(3, axis=2)
    # A frame of two equal pixels makes both libraries' borders the same.
    framed = np.pad(levels, ((2, 2), (2, 2), (0, 0)))
    theirs = laplace(framed[:, :, 0].astype(float), ksize=3)
    assert laplacian_variance(Image.fromarray(framed)) == pytest.approx(theirs.var(), rel=1e-12)


def test_brightness_does_not_matter_and_contrast_counts_squared() -> None:
    soft = noise(0, 32, 32).point([level // 4 for level in range(256)] * 3).convert("L").convert("RGB")
    brighter = soft.point([level + 100 for level in range(156)] + [255] * 100 + [0] * 512)
    brighter = Image.merge("RGB", [brighter.split()[0]] * 3)
    doubled = Image.merge("RGB", [soft.split()[0].point([min(2 * level, 255) for level in range(256)])] * 3)
    assert laplacian_variance(brighter) == laplacian_variance(soft)
    assert laplacian_variance(doubled) == pytest.approx(4 * laplacian_variance(soft))


def test_blur_lowers_it_step_by_step() -> None:
    image = noise(0, 64, 64)
    blurred = [image.filter(ImageFilter.GaussianBlur(radius)) for radius in (4, 2, 1)]
    values = [score.value or 0.0 for score in SharpnessReward().score(make_batch([*blurred, image]))]
    assert values == sorted(values)
    assert values[0] < 0.1
    assert values[-1] > 0.9


def test_the_same_whatever_the_threads() -> None:
    image, threads = noise(5, 301, 257), cv2.getNumThreads()
    variances = []
    for count in (1, 2):
        cv2.setNumThreads(count)
        variances.append(laplacian_variance(image))
    cv2.setNumThreads(threads)
    assert variances[0] == variances[1]


def test_version_names_opencv() -> None:
    assert SharpnessReward().version == f"1+opencv-{cv2.__version__}"
