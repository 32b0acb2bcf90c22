"""The policy terms by hand, their slopes, and on which side each bound binds."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.losses import LOSSES, Denominators, LossSettings, PolicyTerm, TermInputs
from grpo_core.losses.surrogates import vespo_weights

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


@given(RATIOS, ADVANTAGES, LOW_CLIPS, HIGH_CLIPS)
def test_clipping_never_promises_more(ratio: float, advantage: float, low: float, high: float) -> None:
    """The clipped term is never below the unclipped one: min is pessimistic for both signs."""
    assert clipped(ratio, advantage, low=low, high=high)[0] >= -math.exp(math.log(ratio)) * advantage


@given(RATIOS, ADVANTAGES, HIGH_CLIPS, st.floats(0.01, 3.0))
def test_delta_caps_the_unclipped_branch_alone(ratio: float, advantage: float, high: float, above: float) -> None:
    """For A >= 0 nothing changes; for A < 0 the term is as without delta, up to -delta A and flat from there."""
    delta = 1 + high + above
    assume(math.exp(math.log(ratio)) not in (0.8, 1 + high, delta))
    value, slope, _ = clipped(ratio, advantage, high=high, delta=delta)
    plain_value, plain_slope, _ = clipped(ratio, advantage, high=high)
    if advantage >= 0 or math.exp(math.log(ratio)) <= delta:
        assert (value, slope) == (plain_value, plain_slope)
    else:
        assert (value, slope) == (pytest.approx(-delta * advantage), 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        # The log-prob is log 0.5 + log r; the slope is -min(r, 2) A whatever the log-prob.
        (1.0, 2.0, -2 * math.log(0.5), -2.0),
        (1.5, -2.0, 3 * math.log(0.75), 3.0),
        (4.0, 1.0, -2 * math.log(2.0), -2.0),
        (4.0, -1.0, 2 * math.log(2.0), 2.0),
        (0.1, 1.0, -0.1 * math.log(0.05), -0.1),
    ],
)
def test_cispo_by_hand(ratio: float, advantage: float, value: float, slope: float) -> None:
    *found, term = one_token(LossSettings("cispo", ratio_cap=2.0), ratio, advantage, old=math.log(0.5))
    assert found == pytest.approx([value, slope])
    assert term.clipped_high is not None
    assert bool(term.clipped_high) == (ratio == 4.0 and advantage == 1.0)


def sapo(ratio: float, advantage: float) -> tuple[float, float]:
    return one_token(LossSettings("sapo"), ratio, advantage)[:2]


def test_sapo_by_hand() -> None:
    """Sigmoid(0) = 1/2 and its slope 1/4: value -2 A / tau, slope -A. At r = 3: sigmoid(2) = .880797."""
    assert sapo(1.0, 2.0) == pytest.approx((-4.0, -2.0))
    assert sapo(1.0, -2.0) == pytest.approx((4.0 / 1.05, 2.0))
    assert sapo(3.0, 1.0) == pytest.approx((-4 * 0.880797, -4 * 3 * 0.880797 * 0.119203), rel=1e-5)
    assert sapo(3.0, -1.0) == pytest.approx((4 / 1.05 * 0.890903, 4 * 3 * 0.890903 * 0.109097), rel=1e-5)


@given(RATIOS, st.floats(0.1, 3.0) | st.floats(-3.0, -0.1))
def test_sapo_pushes_the_right_way_and_least_far_from_one(ratio: float, advantage: float) -> None:
    slope = sapo(ratio, advantage)[1]
    assert slope * advantage < 0
    assert abs(slope) <= ratio * abs(advantage) * (1 + 1e-12)


VESPO = LossSettings("vespo")


def test_vespo_weights_by_hand() -> None:
    """Ratios 2 and 3: w = 6. A >= 0: 36 exp(3 (1 - 6)); A < 0: 216 exp(2 (1 - 6)). Weights 1/2 bring w to 1.5."""
    log_ratio = torch.tensor([[2.0, 3.0]] * 3, dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    found = vespo_weights(inputs_of(log_ratio, advantages), VESPO)
    expected = [36 * math.exp(-15), 216 * math.exp(-10), 36 * math.exp(-15)]
    assert found.tolist() == pytest.approx(expected)
    halves = torch.full((3, 2), 0.5, dtype=torch.float64)
    found = vespo_weights(inputs_of(log_ratio, advantages, weights=halves), VESPO)
    assert found.tolist() == pytest.approx([2.25 * math.exp(-1.5), 3.375 * math.exp(-1), 2.25 * math.exp(-1.5)])


def test_vespo_weight_of_a_masked_token_is_not_zero_times_infinity() -> None:
    """A mismatch weight of 0 counts as 1e-8: the row keeps a weight of about nothing, and no NaN."""
    weights = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = vespo_weights(inputs_of(torch.zeros(1, 2, dtype=torch.float64), one(1.0), weights=weights), VESPO)
    assert found.tolist() == pytest.approx([1e-16 * math.exp(3)], rel=1e-6)


@pytest.mark.parametrize("distance", [-1e4, 1e4])
def test_vespo_is_finite_however_far_the_policy_is(distance: float) -> None:
    found = vespo_weights(inputs_of(torch.full((1, 3), distance), torch.tensor([-1.0])), VESPO)
    assert 0 <= float(found) < 1e-15
