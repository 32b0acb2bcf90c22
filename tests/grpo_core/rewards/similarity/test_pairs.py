import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.rewards.reward import Score, clamp_unit
from grpo_core.rewards.similarity.pairs import PairReward
from tests.grpo_core.rewards.conftest import flat, make_batch


@dataclasses.dataclass(frozen=True)
class MeasuredReward(PairReward):
    """Scores by a function of the test."""

    function: Callable[[Tensor, Tensor], Tensor]
    min_side: int = 1
    name = "measured"
    version = "1"

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.function(images, targets)

    def to_value(self, raw: float) -> float:
        return clamp_unit(raw)


def difference(images: Tensor, targets: Tensor) -> Tensor:
    return (images - targets).flatten(1).mean(1)


def test_samples_without_target_have_no_score() -> None:
    batch = make_batch([flat(255), flat(51), flat(51)], [flat(0), None, flat(0)])
    scores = MeasuredReward(difference).score(batch)
    assert scores[1] == Score(None, None)
    assert scores[0] == Score(1.0, 1.0)
    assert scores[2].raw == pytest.approx(0.2)


def test_target_takes_the_images_size() -> None:
    shapes = []

    def record(images: Tensor, targets: Tensor) -> Tensor:
        shapes.append((tuple(images.shape), tuple(targets.shape)))
        return torch.zeros(1)

    batch = make_batch([flat(0, 40, 20), flat(0, 16, 16)], [flat(0, 80, 40), flat(0, 64, 64)])
    MeasuredReward(record).score(batch)
    assert shapes == [((1, 3, 20, 40),) * 2, ((1, 3, 16, 16),) * 2]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_a_failure_of_that_sample_alone(broken: float) -> None:
    def measure(images: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([broken if images.sum() > 0 else 0.5])

    batch = make_batch([flat(9), flat(0), flat(8)], [flat(0)] * 3, ["p1/0", "p1/1", "p1/2"])
    first, second, third = MeasuredReward(measure).score(batch)
    assert second == Score(0.5, 0.5)
    assert first == third == Score.failed(f"the reward is {broken}, not a finite number")


def test_small_image_is_refused_with_its_size_and_sample() -> None:
    batch = make_batch([flat(0, 32, 10)], [flat(0, 32, 10)], ["p3/4"])
    with pytest.raises(InputError, match=r"sample p3/4: got 'image of 32x10 pixels'.*at least 11 pixels"):
        MeasuredReward(difference, min_side=11).score(batch)


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="one entry per sample"):
        make_batch([flat(0), flat(0)], [flat(0)])
