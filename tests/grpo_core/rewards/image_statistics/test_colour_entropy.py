import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.measure import shannon_entropy

from grpo_core.rewards.image_statistics.colour_entropy import ColourEntropyReward, colour_entropy_bits
from grpo_core.rewards.reward import Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def stripes(colours: list[tuple[int, int, int]]) -> Image.Image:
    """One column of pixels a colour."""
    return Image.fromarray(np.array([colours] * 4, dtype=np.uint8))


def test_by_hand() -> None:
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
def test_agrees_with_scikit_image(seed: int, bins: int, size: tuple[int, int]) -> None:
    image = noise(seed, *size)
    cells = np.asarray(image).astype(int) // (256 // bins) @ np.array([bins * bins, bins, 1])
    assert colour_entropy_bits(image, bins) == pytest.approx(shannon_entropy(cells), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_where_the_pixels_stand_does_not_matter(seed: int) -> None:
    pixels = np.asarray(noise(seed, 20, 20)).reshape(-1, 3)
    shuffled = np.random.default_rng(seed).permutation(pixels).reshape(40, 10, 3)
    first, second = ColourEntropyReward().score(make_batch([noise(seed, 20, 20), Image.fromarray(shuffled)]))
    assert first == second


def test_a_narrower_palette_scores_less() -> None:
    values = [
        score.value
        for score in ColourEntropyReward().score(
            make_batch([flat(0), noise(0, 32, 32).quantize(4), noise(0, 32, 32).convert("L"), noise(0, 32, 32)])
        )
    ]
    assert values == sorted(values, key=lambda value: value or 0.0)
    assert len(set(values)) == 4
