"""Mismatch weights by hand, and what must hold for any numbers."""

import math
from typing import Any

import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.losses import MismatchSettings, mismatch_weights

OLD = torch.tensor([[2.0, 0.25, 9.0], [4.0, 2.0, 1.0]]).log()
ROLLOUT = torch.zeros(2, 3)
MASK = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("mode", "level", "floor", "weights"),
    [
        ("truncate", "token", 0.0, [[2, 0.25, 1], [3, 2, 1]]),
        ("truncate", "token", 0.5, [[2, 0.5, 1], [3, 2, 1]]),
        ("mask", "token", 0.0, [[2, 0.25, 1], [0, 2, 1]]),
        ("mask", "token", 0.5, [[2, 0, 1], [0, 2, 1]]),
        # Products of the rows: 0.5 and 8.
        ("truncate", "sequence", 0.0, [[0.5, 0.5, 1], [3, 3, 3]]),
        ("truncate", "sequence", 0.75, [[0.75, 0.75, 1], [3, 3, 3]]),
        ("mask", "sequence", 0.0, [[0.5, 0.5, 1], [0, 0, 0]]),
        ("mask", "sequence", 0.75, [[0, 0, 1], [0, 0, 0]]),
    ],
)
def test_by_hand(mode: Any, level: Any, floor: float, weights: list[list[float]]) -> None:
    found = mismatch_weights(OLD, ROLLOUT, MASK, MismatchSettings(mode, level, 3.0, floor))
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float32))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_product_too_large_for_a_float_is_bounded(mode: Any) -> None:
    far = torch.full((1, 400), 1.0)
    found = mismatch_weights(far, torch.zeros(1, 400), far.bool(), MismatchSettings(mode, "sequence"))
    assert torch.equal(found, torch.full((1, 400), 3.0 if mode == "truncate" else 0.0))


def test_a_log_prob_that_is_not_a_number_stays_one() -> None:
    """A weight made up in its place would hide a damaged record."""
    rollout = torch.tensor([[math.nan, 0.0]])
    found = mismatch_weights(torch.zeros(1, 2), rollout, torch.ones(1, 2).bool(), MismatchSettings("mask"))
    assert found.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("cap", "floor", "place"),
    [(0.9, 0.0, "cap"), (math.nan, 0.0, "cap"), (3.0, 1.1, "floor"), (3.0, -0.1, "floor"), (1.0, 1.0, "floor")],
)
def test_bounds_that_exclude_agreement_are_refused(cap: float, floor: float, place: str) -> None:
    with pytest.raises(InputError, match=rf"update\.mismatch\.{place}"):
        MismatchSettings("truncate", "token", cap, floor)
