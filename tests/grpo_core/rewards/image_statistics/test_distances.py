import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_core.rewards.image_statistics.diversity import Distance, lpips_distance, pixel_distance
from grpo_core.rewards.similarity.lpips import load_network, perceptual_distance
from grpo_core.rewards.tensors import to_tensor
from grpo_core.rewards.weights.files import WeightFile, file_sha256
from tests.grpo_core.rewards.conftest import flat, noise


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 20), height=st.integers(1, 20))
def test_pixels_are_numpys_root_mean_square(seed: int, width: int, height: int) -> None:
    first, second = noise(seed, width, height), noise(seed + 1, width, height)
    difference = np.asarray(first) / 255 - np.asarray(second) / 255
    expected = pytest.approx(math.sqrt((difference**2).mean()), abs=1e-12)
    assert pixel_distance().means([first, second]) == [expected] * 2


@pytest.mark.parametrize("size", [(31, 31), (64, 48)])
def test_lpips_is_that_of_the_pair_to_the_bit(trunk_file: Path, size: tuple[int, int]) -> None:
    network = load_network("alex", WeightFile("weights", str(trunk_file), file_sha256(str(trunk_file))), "cpu")
    first, second = noise(0, *size), flat(70, *size)
    with torch.inference_mode():
        pair = perceptual_distance(network, to_tensor(first), to_tensor(second)).item()
        reverse = perceptual_distance(network, to_tensor(second), to_tensor(first)).item()
    assert pair > 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lpips_distance(network, "cpu").means([first, second]) == [pair, pair] == [reverse, reverse]


def test_every_image_is_prepared_once_and_every_pair_measured_once() -> None:
    prepared, measured = [], []

    def prepare(image: Image.Image) -> int:
        prepared.append(image.width)
        return image.width

    def between(first: int, second: int) -> float:
        measured.append((first, second))
        return float(abs(first - second))

    means = Distance(prepare, between).means([flat(0, width, 1) for width in (1, 2, 4, 9)])
    # Of 1: 1, 3, 8. Of 2: 1, 2, 7. Of 4: 3, 2, 5. Of 9: 8, 7, 5.
    assert means == [12 / 3, 10 / 3, 10 / 3, 20 / 3]
    assert prepared == [1, 2, 4, 9]
    assert sorted(measured) == [(1, 2), (1, 4), (1, 9), (2, 4), (2, 9), (4, 9)]


def test_a_distance_that_is_no_number_spoils_both_of_its_pair() -> None:
    def between(first: int, second: int) -> float:
        return math.nan if {first, second} == {1, 2} else 0.5

    means = Distance(lambda image: image.width, between).means([flat(0, width, 1) for width in (1, 2, 3)])
    assert [math.isnan(mean) for mean in means] == [True, True, False]
    assert means[2] == 0.5
