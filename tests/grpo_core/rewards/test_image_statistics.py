"""Statistics of single images: edges, sharpness, colours and JPEG size, by hand and against other libraries."""

import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, features
from skimage.filters import laplace
from skimage.measure import shannon_entropy

from grpo_core.rewards.image_statistics import (
    ColourEntropyReward,
    EdgeDensityReward,
    JpegReward,
    SharpnessReward,
    colour_entropy_bits,
    edge_share,
    jpeg_bytes,
    laplacian_variance,
)
from grpo_core.rewards.reward import Reward, provenance_of
from grpo_core.rewards.scoring_batch import Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refusal


@pytest.mark.parametrize(
    ("reward", "library"),
    [
        (EdgeDensityReward(), f"opencv-{cv2.__version__}"),
        (SharpnessReward(), f"opencv-{cv2.__version__}"),
        (JpegReward(), str(features.version("libjpeg_turbo") or features.version("jpg"))),
    ],
)
def test_versions_name_the_library(reward: Reward, library: str) -> None:
    assert reward.version.startswith("1+")
    assert reward.version.endswith(library)


def split(left: tuple[int, int, int], right: tuple[int, int, int]) -> Image.Image:
    """16x16, its right half of another colour."""
    image = Image.new("RGB", (16, 16), left)
    image.paste(right, (8, 0, 16, 16))
    return image


def test_one_straight_edge_is_one_pixel_wide() -> None:
    scores = EdgeDensityReward().score(make_batch([split((0, 0, 0), (255, 255, 255)), flat(128), flat(3, 1, 1)]))
    assert scores == [Score(1 / 16, 1 / 16), Score(0.0, 0.0), Score(0.0, 0.0)]


def test_an_edge_between_colours_of_one_brightness_counts() -> None:
    # ITU-R BT.601: 0.299 * 200 = 59.8, 0.587 * 102 = 59.9.
    assert edge_share(split((200, 0, 0), (0, 102, 0)), 50, 100) == 1 / 16


def test_the_gradient_is_four_times_a_step_so_thresholds_are_by_hand() -> None:
    # Sobel sums 1 + 2 + 1 times the difference of 20 levels: 80.
    step = split((100, 100, 100), (120, 120, 120))
    assert edge_share(step, 40, 79) == 1 / 16
    assert edge_share(step, 40, 81) == 0.0


def test_the_outline_of_a_rectangle_is_counted_by_hand() -> None:
    image = Image.new("RGB", (96, 96))
    ImageDraw.Draw(image).rectangle((20, 30, 70, 60), fill=(255, 255, 255))
    # 51 x 31 pixels: twice both sides, the four corners once.
    assert edge_share(image, 50, 100) == (2 * (51 + 31) - 4) / 96**2


def test_sharpness_of_one_bright_pixel_by_hand() -> None:
    image = flat(0, 8, 8)
    image.putpixel((3, 4), (10, 10, 10))
    # The Laplacian is -40 there, 10 at its four neighbours and 0 at the other 59: mean 0, mean square 2000 / 64.
    assert SharpnessReward(half=31.25).score(make_batch([image])) == [Score(0.5, 31.25)]
    assert SharpnessReward().score(make_batch([image]))[0].value == pytest.approx(31.25 / 531.25)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.tuples(*[st.integers(4, 40)] * 2))
def test_sharpness_agrees_with_scikit_image_inside_the_border(seed: int, size: tuple[int, int]) -> None:
    levels = np.asarray(noise(seed, *size))[:, :, :1].repeat(3, axis=2)
    # A frame of two equal pixels makes both libraries' borders the same.
    framed = np.pad(levels, ((2, 2), (2, 2), (0, 0)))
    theirs = laplace(framed[:, :, 0].astype(float), ksize=3)
    assert laplacian_variance(Image.fromarray(framed)) == pytest.approx(theirs.var(), rel=1e-12)


def test_sharpness_does_not_depend_on_the_threads() -> None:
    image, threads = noise(5, 301, 257), cv2.getNumThreads()
    variances = []
    for count in (1, 2):
        cv2.setNumThreads(count)
        variances.append(laplacian_variance(image))
    cv2.setNumThreads(threads)
    assert variances[0] == variances[1]


def stripes(colours: list[tuple[int, int, int]]) -> Image.Image:
    """One column of pixels a colour."""
    return Image.fromarray(np.array([colours] * 4, dtype=np.uint8))


def test_entropy_by_hand() -> None:
    even = stripes([(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)])
    uneven = stripes([(0, 0, 0), (0, 0, 0), (255, 0, 0), (0, 255, 0)])
    scores = ColourEntropyReward().score(make_batch([even, uneven, flat(7)]))
    # Four colours of a quarter: 2 bits. Shares 1/2, 1/4, 1/4: 1.5 bits. Nine bits are all of 8 x 8 x 8 cells.
    assert scores == [Score(2 / 9, 2.0), Score(1.5 / 9, 1.5), Score(0.0, 0.0)]


def test_bins_start_at_equal_steps_of_levels() -> None:
    # 256 / 8 = 32 levels a bin.
    assert colour_entropy_bits(stripes([(0, 0, 0), (31, 31, 31)]), 8) == 0.0
    assert colour_entropy_bits(stripes([(31, 0, 0), (32, 0, 0)]), 8) == 1.0
    assert colour_entropy_bits(stripes([(85, 0, 0), (86, 0, 0)]), 3) == 1.0
    assert colour_entropy_bits(stripes([(223, 0, 0), (255, 0, 0)]), 8) == 1.0


def test_every_cell_once_is_all_bits() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(16, 256, 32)] * 3), axis=-1).reshape(16, 32, 3).astype(np.uint8)
    assert ColourEntropyReward().score(make_batch([Image.fromarray(grid)])) == [Score(1.0, 9.0)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), bins=st.sampled_from([2, 4, 8, 16]), size=st.tuples(*[st.integers(1, 40)] * 2))
def test_entropy_agrees_with_scikit_image(seed: int, bins: int, size: tuple[int, int]) -> None:
    image = noise(seed, *size)
    cells = np.asarray(image).astype(int) // (256 // bins) @ np.array([bins * bins, bins, 1])
    assert colour_entropy_bits(image, bins) == pytest.approx(shannon_entropy(cells), abs=1e-12)


def plain_save(image: Image.Image, quality: int) -> int:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return len(buffer.getvalue())


@pytest.mark.parametrize("quality", [1, 50, 95, 100])
def test_jpeg_size_is_that_of_a_plain_pillow_file(quality: int) -> None:
    image = noise(3, 40, 24)
    (score,) = JpegReward(quality=quality).score(make_batch([image]))
    assert score.raw == plain_save(image, quality) / 1000


def test_jpeg_value_in_both_directions_by_hand() -> None:
    image = noise(3, 40, 24)
    kilobytes = plain_save(image, 95) / 1000
    # Uncompressed: 40 * 24 pixels of 3 bytes.
    share = kilobytes / 2.88
    assert 0 < share < 1
    batch = make_batch([image])
    assert JpegReward().score(batch) == [Score(1 - share, kilobytes)]
    assert JpegReward(direction="incompressible").score(batch) == [Score(share, kilobytes)]
    assert JpegReward(full_scale_kilobytes=10).score(batch) == [Score(1 - kilobytes / 10, kilobytes)]
    assert JpegReward(full_scale_kilobytes=0.5).score(batch) == [Score(0.0, kilobytes)]
    assert JpegReward(full_scale_kilobytes=0.5, direction="incompressible").score(batch) == [Score(1.0, kilobytes)]


def test_jpeg_metadata_is_not_counted() -> None:
    bare, tagged = noise(4, 32, 32), noise(4, 32, 32)
    tagged.info.update(comment=b"x" * 500, xmp=b"y" * 500, dpi=(300, 300))
    assert plain_save(tagged, 95) > plain_save(bare, 95)
    assert jpeg_bytes(tagged, 95) == jpeg_bytes(bare, 95)


def test_a_jpeg_scale_is_the_same_however_it_is_written() -> None:
    whole, broken = (provenance_of(JpegReward(full_scale_kilobytes=scale)) for scale in (50, 50.0))
    assert whole["settings_digest"] == broken["settings_digest"]


def test_a_side_longer_than_a_jpeg_can_have_is_refused() -> None:
    assert JpegReward().score(make_batch([flat(0, 65_500, 1)]))[0].value is not None
    refused = refusal(JpegReward().score, make_batch([flat(0, 65_501, 1)]))
    assert refused == ("rewards.jpeg, sample s0", "image of 65501x1")
