"""Clamp, range and threshold by hand."""

import math

import pytest
import torch

from grpo_core.rewards.mix.terms import RewardTerm, scaled_values


def scaled(values: list[float], term: RewardTerm, dtype: torch.dtype = torch.float64) -> list[float]:
    found: list[float] = scaled_values(torch.tensor(values, dtype=dtype).unsqueeze(-1), [term]).squeeze(-1).tolist()
    return found


def test_a_plain_term_changes_nothing() -> None:
    assert scaled([-3.5, 0.1, 70.0], RewardTerm()) == [-3.5, 0.1, 70.0]


@pytest.mark.parametrize("normalize", ["group", "running"])
def test_group_and_running_wait_for_the_advantages(normalize: str) -> None:
    assert scaled([1.0, 9.0], RewardTerm(normalize=normalize)) == [1.0, 9.0]  # type: ignore[arg-type]


def test_clamp() -> None:
    assert scaled([-2.0, -1.0, 0.3, 5.0, 6.0], RewardTerm(clamp=(-1.0, 5.0))) == [-1.0, -1.0, 0.3, 5.0, 5.0]


def test_range_goes_on_beyond_its_ends() -> None:
    """(x - 20) / 40: decibels from 20 to 60."""
    term = RewardTerm(normalize="range", range=(20.0, 60.0))
    assert scaled([20.0, 60.0, 30.0, 10.0, 80.0], term) == [0.0, 1.0, 0.25, -0.25, 1.5]


def test_clamp_comes_before_range() -> None:
    """The clamp is in the unit of the value: 10 becomes 20, which is 0; 80 becomes 50, which is 3/4."""
    term = RewardTerm(clamp=(20.0, 50.0), normalize="range", range=(20.0, 60.0))
    assert scaled([10.0, 80.0], term) == [0.0, 0.75]


def test_a_gate_is_its_value_and_never_negative() -> None:
    assert scaled([-0.5, 0.0, 0.25, 1.5], RewardTerm(role="gate")) == [0.0, 0.0, 0.25, 1.5]


def test_a_gate_with_a_range() -> None:
    term = RewardTerm(role="gate", normalize="range", range=(0.5, 1.0))
    assert scaled([0.25, 0.5, 0.75, 1.0], term) == [0.0, 0.0, 0.5, 1.0]


def test_the_threshold_itself_passes() -> None:
    assert scaled([-4.0, 0.499, 0.5, 9.0], RewardTerm(role="gate", threshold=0.5)) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7, 0.9])
def test_a_score_of_fp32_passes_the_threshold_that_it_equals(threshold: float) -> None:
    """.7 of fp32 is .699999988."""
    stored = float(torch.tensor(threshold, dtype=torch.float32))
    term = RewardTerm(role="gate", threshold=threshold)
    assert scaled([stored, threshold, threshold - 1e-6], term) == [1.0, 1.0, 0.0]


def test_a_null_stays_one() -> None:
    terms = [
        RewardTerm(clamp=(0.0, 1.0), normalize="range", range=(0.0, 2.0)),
        RewardTerm(role="gate"),
        RewardTerm(role="gate", threshold=0.5),
    ]
    found = scaled_values(torch.tensor([[math.nan] * 3, [3.0, 0.5, 0.5]]), terms)
    assert found[0].isnan().all()
    assert found[1].tolist() == [0.5, 0.5, 1.0]


def test_each_reward_by_its_own_term() -> None:
    terms = [RewardTerm(2.0), RewardTerm(clamp=(0.0, 1.0)), RewardTerm(normalize="range", range=(0.0, 4.0))]
    values = torch.tensor([[[3.0, 3.0, 3.0]], [[-1.0, -1.0, -1.0]]])
    assert scaled_values(values, terms).tolist() == [[[3.0, 1.0, 0.75]], [[-1.0, 0.0, -0.25]]]
