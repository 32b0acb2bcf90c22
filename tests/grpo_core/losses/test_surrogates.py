"""The policy terms by hand, their slopes, and on which side each bound binds."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.losses import LOSSES, Denominators, LossSettings, PolicyTerm, TermInputs

RATIOS = st.floats(0.05, 5.0)
ADVANTAGES = st.floats(-3.0, 3.0)
LOW_CLIPS = st.floats(0.01, 0.9)
HIGH_CLIPS = st.floats(0.01, 1.5)
ONE = Denominators(1, 1, 1, 1, 1, 1)


def inputs_of(log_ratio: Tensor, advantages: Tensor, old: float = 0.0, weights: Tensor | None = None) -> TermInputs:
    mask = torch.ones_like(log_ratio).bool()
    return TermInputs(old + log_ratio, log_ratio, log_ratio.exp(), advantages, mask, weights, ONE)


def one_token(
    settings: LossSettings, ratio: float, advantage: float, old: float = 0.0
) -> tuple[float, float, PolicyTerm]:
    """The policy term of one token, its derivative by the log-prob, and the term with its flags."""
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    term = LOSSES[settings.loss].term(inputs_of(log_ratio, one(advantage), old), settings)
    assert isinstance(term, PolicyTerm)
    term.values.sum().backward()
    assert log_ratio.grad is not None
    return float(term.values.detach()), float(log_ratio.grad), term


def one(advantage: float) -> Tensor:
    return torch.tensor([advantage], dtype=torch.float64)


def clipped(
    ratio: float, advantage: float, *, low: float = 0.2, high: float = 0.28, delta: float | None = None
) -> tuple[float, float, PolicyTerm]:
    return one_token(LossSettings(clip_range=low, clip_range_high=high, delta=delta), ratio, advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "flags"),
    [
        # -min(r A, clip(r) A) with clip to [0.8, 1.28]; the slope is -r A unless the clipped branch is taken.
        (1.0, 2.0, -2.0, -2.0, (False, False)),
        (1.0, -2.0, 2.0, 2.0, (False, False)),
        (1.2, 2.0, -2.4, -2.4, (False, False)),
        (1.5, 2.0, -2.56, 0.0, (False, True)),
        (1.5, -2.0, 3.0, 3.0, (False, False)),
        (0.5, 2.0, -1.0, -1.0, (False, False)),
        (0.5, -2.0, 1.6, 0.0, (True, False)),
        (0.9, -2.0, 1.8, 1.8, (False, False)),
        (3.0, 0.0, 0.0, 0.0, (False, False)),
    ],
)
def test_clipped_by_hand(ratio: float, advantage: float, value: float, slope: float, flags: tuple[bool, bool]) -> None:
    *found, term = clipped(ratio, advantage)
    assert found == pytest.approx([value, slope])
    assert (term.clipped_low, term.clipped_high) == flags


@given(RATIOS, ADVANTAGES, LOW_CLIPS, HIGH_CLIPS)
def test_gradient_is_zero_exactly_where_a_flag_is_up(ratio: float, advantage: float, low: float, high: float) -> None:
    met = math.exp(math.log(ratio))
    # On a bound itself the slope is any number between those of its two sides.
    assume(met not in (1 - low, 1 + high))
    _, slope, term = clipped(ratio, advantage, low=low, high=high)
    stopped = (advantage > 0 and met > 1 + high) or (advantage < 0 and met < 1 - low)
    assert bool(term.clipped_low) or bool(term.clipped_high) if stopped else not (term.clipped_low or term.clipped_high)
    assert slope == (0.0 if stopped else pytest.approx(-met * advantage))
