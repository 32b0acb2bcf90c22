"""Distances between siblings, and the reward that they make."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_core.rewards.embedding.diversity import Distance, DiversityReward, lpips_distance, pixel_distance
from grpo_core.rewards.model_reward import Placed
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.similarity.lpips import TRUNKS, load_network, perceptual_distance
from grpo_core.rewards.similarity.tensors import to_tensor
from grpo_core.rewards.weights import Weights
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refusal


def grouped(images: Sequence[Image.Image], group_ids: Sequence[str]) -> ScoringBatch:
    return replace(make_batch(images), group_ids=list(group_ids))


@pytest.fixture(scope="session")
def measures(trunk_file: Path, clip_config: Path, clip_weights: Path) -> list[DiversityReward]:
    return [
        DiversityReward(),
        DiversityReward(measure="lpips", weights=str(trunk_file)),
        DiversityReward(measure="clip", weights=str(clip_weights), model=str(clip_config)),
    ]


def test_pixels_by_hand() -> None:
    red = Image.new("RGB", (32, 32), (255, 0, 0))
    scores = DiversityReward().score(grouped([flat(0), flat(255), red], "ggg"))
    # Black to white 1, black to red sqrt(1/3), white to red sqrt(2/3).
    totals = (1 + 3**-0.5, 1 + (2 / 3) ** 0.5, 3**-0.5 + (2 / 3) ** 0.5)
    assert [score.raw for score in scores] == pytest.approx([total / 2 for total in totals], abs=1e-12)
    assert [score.value for score in scores] == [score.raw for score in scores]


def test_clip_is_one_minus_open_clips_cosine(measures: list[DiversityReward], clip_oracle: torch.nn.Module) -> None:
    images = [noise(0, 40, 40), Image.new("RGB", (40, 40), (250, 10, 90))]
    with torch.no_grad():
        pixels = torch.stack([clip_oracle.transform(image) for image in images])  # type: ignore[operator]
        first, second = clip_oracle.encode_image(pixels)  # type: ignore[operator]
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=0).item()
    assert cosine < 0.999
    for score in measures[2].score(grouped(images, "gg")):
        assert score.raw == pytest.approx(1 - cosine, abs=1e-5)


def test_without_siblings_or_groups_there_is_no_score(measures: list[DiversityReward]) -> None:
    images = [flat(0), noise(0, 32, 32), flat(255)]
    none = Score(None, None)
    for reward in (*measures, DiversityReward(measure="lpips"), DiversityReward(measure="clip")):
        assert list(reward.score(make_batch(images))) == [none] * 3
        assert list(reward.score(grouped(images, "abc"))) == [none] * 3
    first, alone, last = DiversityReward().score(grouped(images, "aba"))
    assert (first, alone, last) == (Score(1.0, 1.0), none, Score(1.0, 1.0))


def test_a_collapsed_group_has_none_and_variety_has_more(measures: list[DiversityReward]) -> None:
    same = [noise(7, 48, 48)] * 3
    varied = [noise(0, 48, 48), flat(255, 48, 48), Image.new("RGB", (48, 48), (250, 10, 90))]
    for reward in measures:
        scores = reward.score(grouped([*same, *varied], "aaabbb"))
        assert list(scores[:3]) == [Score(0.0, 0.0)] * 3
        assert all((score.value or 0.0) > 0.001 for score in scores[3:])


def test_siblings_of_two_sizes_are_compared_at_the_smaller() -> None:
    board = Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")
    scores = DiversityReward().score(grouped([board, flat(128, 32, 32)], "gg"))
    # Shrunk to 32 pixels the board is grey, but for the corners' rounding; at 64 it would be 0.5 from grey.
    assert scores[0] == scores[1]
    assert scores[0].raw is not None
    assert scores[0].raw < 0.05
    place, _ = refusal(DiversityReward().score, grouped([flat(0, 64, 32), flat(0, 32, 32)], "gg"))
    assert place == "rewards.diversity, siblings of sample s0"


def test_small_images_are_refused_by_lpips_alone(trunk_file: Path) -> None:
    batch = grouped([flat(0, 30, 40), flat(9, 30, 40)], "gg")
    refused = refusal(DiversityReward(measure="lpips", weights=str(trunk_file)).score, batch)
    assert refused == ("rewards.diversity, sample s0", "image of 30x40 pixels")
    assert DiversityReward().score(batch)[0].value == pytest.approx(9 / 255)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 20), height=st.integers(1, 20))
def test_pixels_are_numpys_root_mean_square(seed: int, width: int, height: int) -> None:
    first, second = noise(seed, width, height), noise(seed + 1, width, height)
    difference = np.asarray(first) / 255 - np.asarray(second) / 255
    expected = pytest.approx(math.sqrt((difference**2).mean()), abs=1e-12)
    assert pixel_distance().means([first, second]) == [expected] * 2


@pytest.mark.parametrize("size", [(31, 31), (64, 48)])
def test_lpips_is_that_of_the_pair_to_the_bit(trunk_file: Path, size: tuple[int, int]) -> None:
    network = load_network(Weights("weights", str(trunk_file), None, TRUNKS["alex"]), "alex", Placed())
    first, second = noise(0, *size), flat(70, *size)
    with torch.inference_mode():
        pair = perceptual_distance(network, to_tensor(first), to_tensor(second)).item()
        reverse = perceptual_distance(network, to_tensor(second), to_tensor(first)).item()
    assert pair > 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lpips_distance(network, "cpu").means([first, second]) == [pair, pair] == [reverse, reverse]


def test_every_image_is_prepared_once_and_every_pair_measured_once() -> None:
    prepared, measured = [], []

    def prepare(images: Sequence[Image.Image]) -> list[int]:
        prepared.extend(image.width for image in images)
        return [image.width for image in images]

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

    means = Distance(lambda images: [image.width for image in images], between).means(
        [flat(0, width, 1) for width in (1, 2, 3)]
    )
    assert [math.isnan(mean) for mean in means] == [True, True, False]
    assert means[2] == 0.5
