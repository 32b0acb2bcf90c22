"""What a term refuses, by the field that has to change."""

import math
from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.mix.terms import RewardTerm

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
        ("clamp", {"clamp": (0.0, math.inf)}),
        ("clamp", {"clamp": (math.nan, 1.0)}),
        ("range", {"normalize": "range"}),
        ("range", {"range": (0.0, 1.0)}),
        ("range", {"normalize": "group", "range": (0.0, 1.0)}),
        ("range", {"normalize": "range", "range": (1.0, 1.0)}),
        ("range", {"normalize": "range", "range": (0.0, math.nan)}),
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
    assert str(caught.value.value) == str(options.get(field))


@pytest.mark.parametrize(
    "options",
    [
        {"weight": 0.0},
        {"weight": -2.5, "clamp": (-1.0, 1.0), "normalize": "running"},
        {"clamp": (0.0, 5.0), "normalize": "range", "range": (-10.0, 10.0)},
        {**GATE, "clamp": (0.0, 1.0)},
        {**GATE, "normalize": "range", "range": (0.0, 10.0), "clamp": (0.0, 10.0)},
        {**GATE, "threshold": 0.0},
    ],
)
def test_allowed(options: dict[str, Any]) -> None:
    term = RewardTerm(**options)
    assert {field: getattr(term, field) for field in options} == options
