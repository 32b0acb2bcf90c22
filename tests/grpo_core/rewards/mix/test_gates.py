"""A reward that multiplies, and what happens where it is null."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.rewards.mix.combine import CombinedRewards, combine_rewards
from grpo_core.rewards.mix.terms import MissingRewards, RewardTerm

NULL = math.nan
SUM, GATE = RewardTerm(), RewardTerm(role="gate")


def group(*rows: list[float]) -> Tensor:
    return torch.tensor([list(rows)], dtype=torch.float64)


PASSING = RewardTerm(role="gate", threshold=0.6)
NULL_GATE = [[0.6, NULL], [0.6, 1.0], [0.6, 0.5]]


@pytest.mark.parametrize(
    ("terms", "values", "missing", "rewards", "scaled"),
    [
        # (2 x .5 + .4) x .25, (2 x 1 + .2) x 1.
        ([RewardTerm(2.0), GATE, SUM], [[0.5, 0.25, 0.4], [1.0, 1.0, 0.2]], "group_mean", [0.35, 2.2], [0.25, 1.0]),
        ([SUM, GATE, GATE], [[0.8, 0.5, 0.5], [0.8, 0.5, 0.0]], "group_mean", [0.2, 0.0], [0.5, 0.5]),
        # A gate of 0 lifts a penalty, hence the advice to keep rewards and weights under a gate at 0 or above.
        ([RewardTerm(-1.0), GATE], [[0.5, 0.0], [0.5, 1.0]], "group_mean", [0.0, -0.5], [0.0, 1.0]),
        # A null gate takes the mean of the group's, .75; is left out; or drops its sample.
        ([SUM, GATE], NULL_GATE, "group_mean", [0.45, 0.6, 0.3], [0.75, 1.0, 0.5]),
        ([SUM, GATE], NULL_GATE, "renormalize", [0.6, 0.6, 0.3], [NULL, 1.0, 0.5]),
        ([SUM, GATE], NULL_GATE, "drop", [NULL, 0.6, 0.3], [NULL, 1.0, 0.5]),
        # With a threshold it takes the share that passed, 1/3: not the mean of the values, 2/3, which would pass.
        (
            [SUM, PASSING],
            [[0.9, NULL], [0.9, 0.55], [0.9, 0.5], [0.9, 0.95]],
            "group_mean",
            [0.3, 0.0, 0.0, 0.9],
            [1 / 3, 0.0, 0.0, 1.0],
        ),
        # A gate weighs nothing: the sum of magnitudes is 1 + 3, of which 1 is left.
        ([SUM, GATE, RewardTerm(3.0)], [[0.5, 1.0, NULL], [0.1, 0.5, NULL]], "group_mean", [2.0, 0.2], [1.0, 0.5]),
        # .4 and .8 behind gates 1 and .5: the null is .6, the mean before the gates, behind its own gate of .5.
        ([SUM, GATE], [[0.4, 1.0], [0.8, 0.5], [NULL, 0.5]], "renormalize", [0.4, 0.4, NULL], [1.0, 0.5, 0.5]),
        (
            [SUM, GATE, SUM],
            [[0.4, 1.0, 0.0], [0.8, 0.5, 0.0], [NULL, 0.5, 0.0]],
            "group_mean",
            [0.4, 0.4, 0.3],
            [1.0, 0.5, 0.5],
        ),
        # A sample with nothing but a gate has no reward; a null of weight 0 takes nothing.
        ([SUM, GATE], [[NULL, 1.0], [0.5, 1.0]], "renormalize", [NULL, 0.5], [1.0, 1.0]),
        ([SUM, RewardTerm(0.0)], [[0.5, NULL], [0.1, 0.2]], "group_mean", [0.5, 0.1], [NULL, 0.2]),
    ],
)
def test_by_hand(
    terms: list[RewardTerm],
    values: list[list[float]],
    missing: MissingRewards,
    rewards: list[float],
    scaled: list[float],
) -> None:
    """The rewards, and the second term's value of each sample as it counted."""
    combined = combine_rewards(group(*values), terms, missing=missing)
    assert combined.rewards[0].tolist() == pytest.approx(rewards, nan_ok=True)
    assert combined.scaled[0, :, 1].tolist() == pytest.approx(scaled, nan_ok=True)
    assert combined.present[0].tolist() == [not math.isnan(reward) for reward in rewards]
    imputed = [
        missing == "group_mean" and math.isnan(row[1]) and not math.isnan(value)
        for row, value in zip(values, scaled, strict=True)
    ]
    assert combined.imputed[0, :, 1].tolist() == imputed


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
