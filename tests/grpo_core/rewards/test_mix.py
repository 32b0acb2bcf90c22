import itertools
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.rewards.mix import CombinedRewards, RunningMoments, combine_rewards
from grpo_core.rewards.registry import MissingRewards, RewardTerm

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


def test_infinite_reward_raises_with_its_place() -> None:
    with pytest.raises(NonFiniteError) as caught:
        combine(group([0.1, 0.2], [0.3, math.inf]), [1.0, 1.0])
    assert caught.value.sample_ids == ("0/1",)


def test_terms_that_do_not_fit_or_add_nothing_are_refused() -> None:
    none = RewardTerm(0.0)
    for terms in ([RewardTerm()], [RewardTerm()] * 3, [none, none], [RewardTerm(role="gate"), none]):
        with pytest.raises(ValueError, match="expected"):
            combine_rewards(group([0.1, 0.2]), terms)


SUM, GATE = RewardTerm(), RewardTerm(role="gate")


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
def test_gates_by_hand(
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


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop", "zero"])
def test_a_gate_that_is_null_for_the_whole_group_is_left_out(missing: MissingRewards) -> None:
    values = torch.tensor([[[0.6, NULL], [0.2, NULL]], [[0.6, 0.5], [0.2, 0.0]]], dtype=torch.float64)
    combined = combine_rewards(values, [SUM, GATE], missing=missing)
    assert combined.rewards.tolist() == [[0.6, 0.2], [0.3, 0.0]]
    assert not combined.imputed.any()


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop", "zero"])
def test_a_gate_of_another_dataset_does_not_multiply(missing: MissingRewards) -> None:
    """However it was scored there; in the second group it applies, and its sum does without the second reward."""
    values = torch.tensor([[[0.6, 0.4, 0.0], [0.2, 0.1, NULL]], [[0.6, 0.9, 0.5], [0.2, NULL, 0.0]]]).double()
    applies = torch.tensor([[True, True, False], [True, False, True]])
    combined = combine_rewards(values, [SUM, SUM, GATE], applies=applies, missing=missing)
    torch.testing.assert_close(combined.rewards, torch.tensor([[1.0, 0.3], [0.3, 0.0]]).double())
    assert combined.scaled.isnan().tolist() == [[[False, False, True]] * 2, [[False, True, False]] * 2]
    assert combined.weights.tolist() == [[[1.0, 1.0, 0.0]] * 2, [[1.0, 0.0, 0.0]] * 2]


nullable = st.one_of(st.just(NULL), st.floats(0, 1, width=32))
TERMS = [RewardTerm(0.7), GATE, RewardTerm(0.3, clamp=(0.2, 0.9)), RewardTerm(role="gate", threshold=0.4)]


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop", "zero"])
@given(st.lists(st.tuples(*[nullable] * 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_order_of_siblings_does_not_matter_and_gates_only_lower(
    missing: MissingRewards, rows: list[tuple[float, ...]], random: Any
) -> None:
    values = torch.tensor([rows], dtype=torch.float64)
    order = list(range(len(rows)))
    random.shuffle(order)
    straight, shuffled = (combine_rewards(each, TERMS, missing=missing) for each in (values, values[:, order]))
    for field in ("rewards", "scaled", "weights"):
        there, back = getattr(straight, field)[:, order], getattr(shuffled, field)
        torch.testing.assert_close(back, there, equal_nan=True)
    assert torch.equal(shuffled.imputed, straight.imputed[:, order])
    open_gates = combine_rewards(values, TERMS, missing=missing, applies=torch.tensor([[True, False, True, False]]))
    found = straight.present
    assert (straight.rewards[found] <= open_gates.rewards[found] + 1e-12).all()
    assert ((open_gates.rewards[found] >= 0) & (open_gates.rewards[found] <= 1 + 1e-9)).all()
    assert (straight.rewards[found] >= 0).all()
    assert torch.equal(straight.rewards.isnan(), ~found)


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


nullable_values = st.one_of(st.just(NULL), st.floats(-1000, 1000))
ROWS = st.lists(st.tuples(nullable_values, nullable_values), min_size=1, max_size=30)


def of(rows: list[tuple[float, float]]) -> RunningMoments:
    return RunningMoments.of(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2))


def test_running_moments_by_hand() -> None:
    """1, 3, 8: mean 4, squares 9 + 1 + 16; the second reward was known once."""
    moments = of([(1.0, NULL), (3.0, 7.0), (8.0, NULL)])
    assert moments == RunningMoments((3, 1), (4.0, 7.0), (26.0, 0.0))
    assert moments.stds == (pytest.approx(math.sqrt(13)), 0.0)


def test_two_calls_by_hand() -> None:
    """0, 2 and 7: mean 3, squares 9 + 1 + 16."""
    merged = RunningMoments((2,), (1.0,), (2.0,)).merged(RunningMoments((1,), (7.0,), (0.0,)))
    assert merged == RunningMoments((3,), (3.0,), (26.0,))


@given(ROWS, st.lists(st.integers(0, 30), max_size=4))
def test_any_split_has_the_moments_of_the_whole(rows: list[tuple[float, float]], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    merged = RunningMoments.empty(2)
    for first, last in itertools.pairwise(bounds):
        merged = merged.merged(of(rows[first:last]))
    for index, (count, mean, std) in enumerate(zip(merged.counts, merged.means, merged.stds, strict=True)):
        known = np.array([row[index] for row in rows if not math.isnan(row[index])])
        assert count == len(known)
        size = float(np.abs(known).max(initial=0.0))
        assert mean == pytest.approx(known.mean() if count else 0.0, rel=1e-12, abs=1e-12 * size)
        assert std == pytest.approx(known.std(ddof=1) if count > 1 else 0.0, rel=1e-12, abs=1e-12 * size)


def test_a_small_spread_on_a_large_mean_survives_many_calls() -> None:
    """The sum of squares less the square of the sum would have lost it: 1e14 in fp64 keeps two digits behind it."""
    values = 1e7 + torch.linspace(0.0, 0.01, 1001, dtype=torch.float64)
    merged = RunningMoments.empty(1)
    for chunk in values.split(7):
        merged = merged.merged(RunningMoments.of(chunk.unsqueeze(-1)))
    assert merged.stds[0] == pytest.approx(float(values.std()), rel=1e-6)


def test_equal_values_have_no_spread_over_many_calls() -> None:
    """The mean of three 0.1 is not 0.1 in binary."""
    merged = RunningMoments.empty(1)
    for _ in range(50):
        merged = merged.merged(RunningMoments.of(torch.full((3, 1), 0.1, dtype=torch.float64)))
    assert merged.stds == (0.0,)


def test_exact_as_json() -> None:
    moments = of([(0.1, NULL), (1 / 3, 2.0**-60), (1e-300, 7.7)])
    stored = json.loads(json.dumps(asdict(moments)))
    assert RunningMoments(**{name: tuple(numbers) for name, numbers in stored.items()}) == moments


def test_another_number_of_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards and of 3"):
        RunningMoments.empty(2).merged(RunningMoments.empty(3))
