import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.rewards.mix.combine import CombinedRewards, combine_rewards
from grpo_core.rewards.mix.terms import MissingRewards, RewardTerm

NULL = math.nan


def group(*rows: list[float]) -> Tensor:
    return torch.tensor([list(rows)], dtype=torch.float64)


def combine(values: Tensor, weights: list[float], **options: Any) -> CombinedRewards:
    return combine_rewards(values, [RewardTerm(weight) for weight in weights], **options)


def standardised(totals: Tensor) -> list[float]:
    return ((totals - totals.mean()) / (totals.std() + 1e-4)).tolist()


HALF, ONE = [0.5, 0.5], [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "weights", "missing", "rewards", "weighed"),
    [
        ([[0.5, 0.2], [1.0, 0.0]], [2.0, -0.5], "group_mean", [0.9, 2.0], [[2.0, -0.5]] * 2),
        # Null for the whole group: the sum of magnitudes is 5 and 2 are left, so the others grow by 5/2.
        ([[0.5, NULL, 0.2], [1.0, NULL, 0.4]], [1.0, 3.0, -1.0], "group_mean", [0.75, 1.5], [[2.5, 0.0, -2.5]] * 2),
        ([[0.5, 0.3, 0.2], [1.0, 0.1, 0.4]], [1.0, 3.0, -1.0], "group_mean", [1.2, 0.9], [[1.0, 3.0, -1.0]] * 2),
        # Null for some: the mean of 0.2 and 0.6.
        ([[0.5, NULL], [0.1, 0.2], [0.3, 0.6]], HALF, "group_mean", [0.45, 0.15, 0.45], [HALF] * 3),
        ([[0.5, NULL], [0.1, 0.2], [0.3, 0.2]], ONE, "group_mean", [0.7, 0.3, 0.5], [ONE] * 3),
        # Sum of magnitudes 4; 2 are left for the first sample: 2 * 0.5 - 2 * 0.4.
        (
            [[0.5, 0.4, NULL], [1.0, 0.0, 0.2]],
            [1.0, -1.0, 2.0],
            "renormalize",
            [0.2, 1.4],
            [[2.0, -2.0, 0.0], [1.0, -1.0, 2.0]],
        ),
        # A null of weight zero drops nothing.
        ([[0.5, NULL], [0.1, 0.2]], [1.0, 0.0], "drop", [0.5, 0.1], [[1.0, 0.0]] * 2),
    ],
)
def test_by_hand(
    values: list[list[float]],
    weights: list[float],
    missing: MissingRewards,
    rewards: list[float],
    weighed: list[list[float]],
) -> None:
    # A second group, which must not have any influence.
    both = torch.tensor([values, [[0.9] * len(weights)] * len(values)], dtype=torch.float64)
    combined = combine(both, weights, missing=missing)
    assert combined.rewards[0].tolist() == pytest.approx(rewards)
    assert combined.weights[0].tolist() == weighed
    assert combined.present.all()
    imputed = [
        [missing == "group_mean" and math.isnan(value) and weight != 0 for value, weight in zip(row, each, strict=True)]
        for row, each in zip(values, weighed, strict=True)
    ]
    assert combined.imputed.tolist() == [imputed, [[False] * len(weights)] * len(values)]


def test_a_sample_without_scores_has_no_reward_and_changes_no_sibling() -> None:
    with_it = combine(group([NULL, NULL], [0.1, NULL], [0.3, 0.6]), [1.0, 1.0])
    without = combine(group([0.1, NULL], [0.3, 0.6]), [1.0, 1.0])
    assert with_it.present.tolist() == [[False, True, True]]
    assert math.isnan(with_it.rewards[0, 0].item())
    assert with_it.rewards[0, 1:].tolist() == without.rewards[0].tolist()
    assert with_it.imputed[0, 0].tolist() == [False, False]


def test_a_reward_of_weight_zero_has_no_influence() -> None:
    combined = combine(group([NULL, 0.9], [0.4, NULL]), [1.0, 0.0])
    assert combined.present.tolist() == [[False, True]]
    assert combined.rewards[0, 1].item() == pytest.approx(0.4)


def test_one_missing_part_leaves_a_tied_top_sample_above_average() -> None:
    """Advantages of the first of two samples tied at the top, +.72, when its second reward is lost."""
    complete = group([0.49, 0.77], [0.43, 0.83], [0.57, 0.58], [0.29, 0.67])
    lost = complete.clone()
    lost[0, 0, 1] = NULL
    weights = [0.5, 0.5]
    full = combine(complete, weights).rewards[0]
    assert full[0].item() == pytest.approx(full[1].item())
    assert standardised(full)[0] == pytest.approx(0.72, abs=0.005)

    counted_as_zero = lost.nansum(-1)[0] * 0.5
    assert standardised(counted_as_zero)[0] == pytest.approx(-1.40, abs=0.005)
    renormalised_alone = combine(lost, weights, missing="renormalize").rewards[0]
    assert renormalised_alone[0].item() == pytest.approx(0.49)
    assert standardised(renormalised_alone)[0] == pytest.approx(-0.75, abs=0.005)

    combined = combine(lost, weights).rewards[0]
    # Half of 0.49 and half of the mean of the siblings 0.83, 0.58 and 0.67.
    assert combined[0].item() == pytest.approx(0.5916667)
    assert standardised(combined)[0] == pytest.approx(0.35, abs=0.005)


def test_a_sample_with_a_null_is_dropped_on_request() -> None:
    values = torch.tensor([[[0.5, NULL, NULL], [0.1, NULL, 0.2], [0.3, NULL, 0.6]]], dtype=torch.float64)
    combined = combine(values, [1.0, 2.0, 1.0], missing="drop")
    # The second reward is null for all: left out, and no reason to drop a sample. Scale 4 / 2.
    assert combined.present.tolist() == [[False, True, True]]
    assert combined.rewards[0, 1:].tolist() == pytest.approx([0.6, 1.8])
    assert combined.rewards[0, 0].isnan()
    assert not combined.imputed.any()
    assert combined.known.tolist() == [[[False] * 3, [True, False, True], [True, False, True]]]


def test_rewards_of_another_dataset_do_not_rescale() -> None:
    """Dataset A has the first two rewards, B the first and the third; nulls are left out of what applies."""
    values = torch.tensor([[[0.5, 0.2, NULL], [1.0, 0.4, NULL]], [[0.5, NULL, NULL], [1.0, NULL, NULL]]])
    routed = torch.tensor([[True, True, False], [True, False, True]])
    combined = combine(values, [1.0, 3.0, -1.0], applies=routed)
    # A: as configured. B: the third is null for the whole group, so the first carries 1 + 1.
    assert combined.weights.tolist() == [[[1.0, 3.0, 0.0]] * 2, [[2.0, 0.0, 0.0]] * 2]
    torch.testing.assert_close(combined.rewards, torch.tensor([[1.1, 2.2], [1.0, 2.0]]))
    without_routing = combine(values, [1.0, 3.0, -1.0])
    assert without_routing.weights[0].tolist() == [[1.25, 3.75, 0.0]] * 2


@pytest.mark.parametrize("stray", [0.9, math.inf])
def test_a_score_of_another_dataset_is_ignored(stray: float) -> None:
    values = torch.tensor([[[0.5, stray], [1.0, 0.3]]] * 2, dtype=torch.float64)
    combined = combine(values, [1.0, 1.0], applies=torch.tensor([[True, False], [False, False]]))
    assert combined.rewards[0].tolist() == [0.5, 1.0]
    assert combined.present.tolist() == [[True] * 2, [False] * 2]
    assert combined.rewards[1].isnan().all()


nullable = st.one_of(st.just(NULL), st.floats(0, 1, width=32))


@pytest.mark.parametrize("missing", ["group_mean", "renormalize"])
@given(st.lists(st.tuples(nullable, nullable, nullable), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_order_of_siblings_does_not_matter_and_the_result_stays_in_range(
    missing: MissingRewards, rows: list[tuple[float, float, float]], random: object
) -> None:
    values = torch.tensor([rows], dtype=torch.float64)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    combined, shuffled = (combine(v, [0.5, 0.3, 0.2], missing=missing) for v in (values, values[:, order]))
    torch.testing.assert_close(shuffled.rewards, combined.rewards[:, order], equal_nan=True)
    assert torch.equal(combined.present, ~values.isnan().all(-1))
    assert torch.equal(combined.rewards.isnan(), ~combined.present)
    found = combined.rewards[combined.present]
    assert ((found >= -1e-9) & (found <= 1 + 1e-9)).all()


def test_infinite_reward_raises_with_its_place() -> None:
    with pytest.raises(NonFiniteError) as caught:
        combine(group([0.1, 0.2], [0.3, math.inf]), [1.0, 1.0])
    assert caught.value.sample_ids == ("0/1",)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [0.0, 0.0]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        combine(group([0.1, 0.2]), weights)
