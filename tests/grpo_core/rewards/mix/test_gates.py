"""A reward that multiplies, and what happens where it is null."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.rewards.mix.combine import CombinedRewards, MissingRewards, combine_rewards
from grpo_core.rewards.mix.terms import RewardTerm

NULL = math.nan
SUM, GATE = RewardTerm(), RewardTerm(role="gate")


def group(*rows: list[float]) -> Tensor:
    return torch.tensor([list(rows)], dtype=torch.float64)


def test_the_value_multiplies_the_whole_sum() -> None:
    """(2 x .5 + .4) x .25, (2 x 1 + .2) x 1."""
    combined = combine_rewards(group([0.5, 0.25, 0.4], [1.0, 1.0, 0.2]), [RewardTerm(2.0), GATE, SUM])
    assert combined.rewards.tolist() == [[pytest.approx(0.35), pytest.approx(2.2)]]
    assert combined.weights.tolist() == [[[2.0, 0.0, 1.0]] * 2]
    assert combined.scaled.tolist() == [[[0.5, 0.25, 0.4], [1.0, 1.0, 0.2]]]


def test_several_gates_multiply() -> None:
    combined = combine_rewards(group([0.8, 0.5, 0.5], [0.8, 0.5, 0.0]), [SUM, GATE, GATE])
    assert combined.rewards.tolist() == [[pytest.approx(0.2), 0.0]]


def test_a_gate_of_zero_lifts_a_penalty() -> None:
    """Hence the advice to keep rewards and weights under a gate at 0 or above."""
    combined = combine_rewards(group([0.5, 0.0], [0.5, 1.0]), [RewardTerm(-1.0), GATE])
    assert combined.rewards.tolist() == [[0.0, -0.5]]


NULL_GATE = group([0.6, NULL], [0.6, 1.0], [0.6, 0.5])


def test_a_null_gate_takes_the_mean_of_the_groups() -> None:
    combined = combine_rewards(NULL_GATE, [SUM, GATE])
    assert combined.rewards.tolist() == [[pytest.approx(0.45), 0.6, pytest.approx(0.3)]]
    assert combined.scaled[0, :, 1].tolist() == [0.75, 1.0, 0.5]
    assert combined.imputed.tolist() == [[[False, True], [False, False], [False, False]]]


def test_a_null_gate_with_a_threshold_takes_the_share_that_passed() -> None:
    """Not the mean of the values, 2/3, which would have passed."""
    terms = [SUM, RewardTerm(role="gate", threshold=0.6)]
    combined = combine_rewards(group([0.9, NULL], [0.9, 0.55], [0.9, 0.5], [0.9, 0.95]), terms)
    assert combined.rewards.tolist() == [[pytest.approx(0.3), 0.0, 0.0, 0.9]]


def test_a_null_gate_is_left_out_with_renormalize() -> None:
    combined = combine_rewards(NULL_GATE, [SUM, GATE], missing="renormalize")
    assert combined.rewards.tolist() == [[0.6, 0.6, pytest.approx(0.3)]]
    assert combined.weights.tolist() == [[[1.0, 0.0]] * 3]
    assert not combined.imputed.any()
    assert combined.scaled[0, :, 1].isnan().tolist() == [True, False, False]


def test_a_null_gate_drops_the_sample_with_drop() -> None:
    combined = combine_rewards(NULL_GATE, [SUM, GATE], missing="drop")
    assert combined.present.tolist() == [[False, True, True]]
    assert combined.rewards[0, 1:].tolist() == [0.6, pytest.approx(0.3)]


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop"])
def test_a_gate_that_is_null_for_the_whole_group_is_left_out(missing: MissingRewards) -> None:
    values = torch.tensor([[[0.6, NULL], [0.2, NULL]], [[0.6, 0.5], [0.2, 0.0]]], dtype=torch.float64)
    combined = combine_rewards(values, [SUM, GATE], missing=missing)
    assert combined.rewards.tolist() == [[0.6, 0.2], [0.3, 0.0]]
    assert not combined.imputed.any()


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop"])
def test_a_gate_of_another_dataset_does_not_multiply(missing: MissingRewards) -> None:
    """However it was scored there; in the second group it applies, and its sum does without the second reward."""
    values = torch.tensor([[[0.6, 0.4, 0.0], [0.2, 0.1, NULL]], [[0.6, 0.9, 0.5], [0.2, NULL, 0.0]]]).double()
    applies = torch.tensor([[True, True, False], [True, False, True]])
    combined = combine_rewards(values, [SUM, SUM, GATE], applies=applies, missing=missing)
    torch.testing.assert_close(combined.rewards, torch.tensor([[1.0, 0.3], [0.3, 0.0]]).double())
    assert combined.scaled.isnan().tolist() == [[[False, False, True]] * 2, [[False, True, False]] * 2]
    assert combined.weights.tolist() == [[[1.0, 1.0, 0.0]] * 2, [[1.0, 0.0, 0.0]] * 2]


def test_a_gate_weighs_nothing_when_weights_are_renormalised() -> None:
    """Sum of magnitudes 1 + 3, of which 1 is left: a gate's 1 is not among them."""
    combined = combine_rewards(group([0.5, NULL, 1.0], [0.1, NULL, 0.5]), [SUM, RewardTerm(3.0), GATE])
    assert combined.weights.tolist() == [[[4.0, 0.0, 0.0]] * 2]
    assert combined.rewards.tolist() == [[2.0, pytest.approx(0.2)]]


def test_a_null_reward_behind_a_gate_takes_the_mean_before_the_gates() -> None:
    """.4 and .8 behind gates 1 and .5: the null is .6, behind its own gate of .5."""
    combined = combine_rewards(group([0.4, 0.0, 1.0], [0.8, 0.0, 0.5], [NULL, 0.0, 0.5]), [SUM, SUM, GATE])
    assert combined.rewards.tolist() == [[0.4, 0.4, pytest.approx(0.3)]]
    assert combined.scaled[0, :, 0].tolist() == [0.4, 0.8, pytest.approx(0.6)]


def test_a_sample_with_nothing_but_a_gate_has_no_reward() -> None:
    combined = combine_rewards(group([NULL, 1.0], [0.5, 1.0]), [SUM, GATE], missing="renormalize")
    assert combined.present.tolist() == [[False, True]]
    assert combined.rewards[0, 0].isnan()


def test_a_null_that_does_not_count_is_not_imputed() -> None:
    combined = combine_rewards(group([0.5, NULL], [0.1, 0.2]), [SUM, RewardTerm(0.0)])
    assert not combined.imputed.any()
    assert combined.scaled[0, :, 1].isnan().tolist() == [True, False]


def test_gates_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="a reward that adds"):
        combine_rewards(group([0.5, 0.2]), [GATE, RewardTerm(0.0)])


nullable = st.one_of(st.just(NULL), st.floats(0, 1, width=32))
TERMS = [RewardTerm(0.7), GATE, RewardTerm(0.3, clamp=(0.2, 0.9)), RewardTerm(role="gate", threshold=0.4)]


def combine(values: Tensor, missing: MissingRewards, **options: Any) -> CombinedRewards:
    return combine_rewards(values, TERMS, missing=missing, **options)


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop"])
@given(st.lists(st.tuples(*[nullable] * 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_order_of_siblings_does_not_matter_and_gates_below_one_only_lower(
    missing: MissingRewards, rows: list[tuple[float, ...]], random: Any
) -> None:
    values = torch.tensor([rows], dtype=torch.float64)
    order = list(range(len(rows)))
    random.shuffle(order)
    straight, shuffled = combine(values, missing), combine(values[:, order], missing)
    for field in ("rewards", "scaled", "weights"):
        there, back = getattr(straight, field)[:, order], getattr(shuffled, field)
        torch.testing.assert_close(back, there, equal_nan=True)
    assert torch.equal(shuffled.imputed, straight.imputed[:, order])
    open_gates = combine(values, missing, applies=torch.tensor([[True, False, True, False]]))
    found = straight.present
    assert (straight.rewards[found] <= open_gates.rewards[found] + 1e-12).all()
    assert (straight.rewards[found] >= 0).all()


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=6), st.floats(0.01, 100), st.floats(-50, 50))
def test_a_value_in_another_unit_with_clamp_and_range_in_that_unit_is_the_same_reward(
    rows: list[tuple[float, ...]], factor: float, offset: float
) -> None:
    values = torch.tensor([rows], dtype=torch.float64)
    unit = RewardTerm(clamp=(0.1, 0.8), normalize="range", range=(0.0, 0.9))
    other = RewardTerm(
        clamp=(0.1 * factor + offset, 0.8 * factor + offset), normalize="range", range=(offset, 0.9 * factor + offset)
    )
    there = combine_rewards(values[:, :, :1], [unit]).rewards
    back = combine_rewards(values[:, :, :1] * factor + offset, [other]).rewards
    torch.testing.assert_close(back, there, rtol=1e-9, atol=1e-9)
