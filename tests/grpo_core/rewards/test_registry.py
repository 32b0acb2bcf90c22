"""What a term refuses, by the field that has to change, and values scaled by hand."""

import math
from typing import Any

import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.rewards.mix import scaled_values
from grpo_core.rewards.registry import RewardTerm

GATE = {"role": "gate"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("weight", {"weight": math.nan}),
        ("weight", {"weight": -math.inf}),
        ("role", {"role": "product"}),
        ("normalize", {"normalize": "batch"}),
        ("threshold", {"threshold": 0.5}),
        ("clamp", {"clamp": (1.0, 0.0)}),
        ("clamp", {"clamp": (0.5, 0.5)}),
        ("clamp.1", {"clamp": (0.0, math.inf)}),
        ("clamp.0", {"clamp": (math.nan, 1.0)}),
        ("range", {"normalize": "range"}),
        ("range", {"range": (0.0, 1.0)}),
        ("range", {"normalize": "group", "range": (0.0, 1.0)}),
        ("range", {"normalize": "range", "range": (1.0, 1.0)}),
        ("range.1", {"normalize": "range", "range": (0.0, math.nan)}),
        ("weight", {**GATE, "weight": 0.0}),
        ("weight", {**GATE, "weight": 2.0}),
        ("normalize", {**GATE, "normalize": "group"}),
        ("normalize", {**GATE, "normalize": "running"}),
        ("threshold", {**GATE, "threshold": math.nan}),
        ("clamp", {**GATE, "threshold": 0.5, "clamp": (0.0, 1.0)}),
        ("range", {**GATE, "threshold": 0.5, "normalize": "range", "range": (0.0, 1.0)}),
    ],
)
def test_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        RewardTerm(**options)
    assert caught.value.place == f"rewards.{field}"
    if "." not in field:
        assert str(caught.value.value) == str(options.get(field))


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"weight": -2.5}, [-3.5, 0.1, 70.0], [-3.5, 0.1, 70.0]),
        # The advantages normalise by group and by running moments.
        ({"normalize": "group"}, [1.0, 9.0], [1.0, 9.0]),
        ({"normalize": "running", "clamp": (-1.0, 5.0)}, [-2.0, 0.3, 6.0], [-1.0, 0.3, 5.0]),
        # (x - 20) / 40: decibels from 20 to 60, and beyond.
        ({"normalize": "range", "range": (20.0, 60.0)}, [20.0, 60.0, 30.0, 10.0, 80.0], [0.0, 1.0, 0.25, -0.25, 1.5]),
        # The clamp is in the unit of the value: 10 becomes 20, which is 0; 80 becomes 50, which is 3/4.
        ({"clamp": (20.0, 50.0), "normalize": "range", "range": (20.0, 60.0)}, [10.0, 80.0], [0.0, 0.75]),
        (GATE, [-0.5, 0.0, 0.25, 1.5], [0.0, 0.0, 0.25, 1.5]),
        ({**GATE, "normalize": "range", "range": (0.5, 1.0)}, [0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.5, 1.0]),
        ({**GATE, "threshold": 0.5}, [-4.0, 0.499, 0.5, 9.0], [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_scaled_by_hand(options: dict[str, Any], values: list[float], expected: list[float]) -> None:
    column = torch.tensor(values, dtype=torch.float64).unsqueeze(-1)
    assert scaled_values(column, [RewardTerm(**options)]).squeeze(-1).tolist() == expected


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7, 0.9])
def test_a_score_of_fp32_passes_the_threshold_that_it_equals(threshold: float) -> None:
    """.7 of fp32 is .699999988."""
    stored = float(torch.tensor(threshold, dtype=torch.float32))
    values = torch.tensor([[stored], [threshold], [threshold - 1e-6]], dtype=torch.float64)
    term = RewardTerm(role="gate", threshold=threshold)
    assert scaled_values(values, [term]).flatten().tolist() == [1.0, 1.0, 0.0]


def test_a_null_stays_one_and_each_reward_has_its_own_term() -> None:
    terms = [RewardTerm(2.0), RewardTerm(clamp=(0.0, 1.0)), RewardTerm(normalize="range", range=(0.0, 4.0))]
    terms += [RewardTerm(role="gate"), RewardTerm(role="gate", threshold=0.5)]
    found = scaled_values(torch.tensor([[math.nan] * 5, [3.0] * 5, [-1.0] * 5]), terms)
    assert found[0].isnan().all()
    assert found[1:].tolist() == [[3.0, 1.0, 0.75, 3.0, 1.0], [-1.0, 0.0, -0.25, 0.0, 0.0]]
