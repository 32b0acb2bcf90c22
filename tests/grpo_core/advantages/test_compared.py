"""Which samples are compared for each stream, against values worked out by hand."""

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.advantages.compared import compared_samples
from grpo_core.advantages.compute import GroupAdvantages, compute_advantages
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.mix import RunningMoments
from grpo_core.rewards.registry import RewardTerm

NAN = float("nan")


def drafts_of(renderings: list[int], groups: int = 1) -> torch.Tensor:
    """Number the drafts of samples, given how often each is rendered."""
    row = [draft for draft, times in enumerate(renderings) for _ in range(times)]
    return torch.tensor([row] * groups)


def column(*groups: list[float]) -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.float64).unsqueeze(-1)


def test_twelve_drafts_one_of_them_rendered_five_times() -> None:
    """16 samples: the first five are renderings of draft 0, whose mean is 3."""
    drafts = drafts_of([5] + [1] * 11)
    values = column([1.0, 2.0, 3.0, 4.0, 5.0, *range(11)])
    tokens = compared_samples("tokens", values, drafts)
    assert tokens.values.squeeze(-1).tolist() == [[3.0, *map(float, range(11))]]
    assert tokens.samples.tolist() == [[0, *range(5, 16)]]
    denoising = compared_samples("denoising", values, drafts)
    assert denoising.values.squeeze(-1).tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert denoising.samples.tolist() == [[0, 1, 2, 3, 4]]


def test_several_rendered_drafts_are_compared_apart_and_name_their_group() -> None:
    drafts = drafts_of([2, 2, 1], groups=2)
    values = column([1.0, 2.0, 30.0, 50.0, 7.0], [3.0, 4.0, 60.0, 80.0, 9.0])
    compared = compared_samples("denoising", values, drafts)
    assert compared.values.squeeze(-1).tolist() == [[1.0, 2.0], [30.0, 50.0], [3.0, 4.0], [60.0, 80.0]]
    assert compared.samples.tolist() == [[0, 1], [2, 3], [5, 6], [7, 8]]
    assert compared.groups.tolist() == [0, 0, 1, 1]
    tokens = compared_samples("tokens", values, drafts)
    assert tokens.values.squeeze(-1).tolist() == [[1.5, 40.0, 7.0], [3.5, 70.0, 9.0]]
    assert tokens.samples.tolist() == [[0, 2, 4], [5, 7, 9]]


def test_samples_of_a_draft_need_not_stand_together() -> None:
    drafts, values = torch.tensor([[1, 0, 1, 2]]), column([1.0, 5.0, 3.0, 7.0])
    assert compared_samples("denoising", values, drafts).samples.tolist() == [[0, 2]]
    tokens = compared_samples("tokens", values, drafts)
    assert (tokens.values.flatten().tolist(), tokens.samples.tolist()) == ([5.0, 2.0, 7.0], [[1, 0, 3]])


def test_a_pipeline_without_tokens_compares_all_samples_of_a_prompt() -> None:
    values = column([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    compared = compared_samples("denoising", values, drafts_of([3], groups=2))
    assert torch.equal(compared.values, values)
    assert compared.samples.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert compared.groups.tolist() == [0, 1]


def test_where_every_draft_is_rendered_once_the_samples_of_a_prompt_are_described_together() -> None:
    compared = compared_samples("denoising", column([1.0, 2.0], [3.0, 4.0]), torch.tensor([[0, 1], [1, 0]]))
    assert compared.values.squeeze(-1).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert compared.samples.tolist() == [[0, 1], [2, 3]]
    assert compared.groups.tolist() == [0, 1]


def test_a_drafts_reward_is_the_mean_of_those_renderings_that_have_one() -> None:
    values = torch.tensor([[[1.0, NAN], [3.0, NAN], [5.0, 2.0], [NAN, 6.0]]], dtype=torch.float64)
    found = compared_samples("tokens", values, torch.tensor([[0, 0, 1, 1]])).values
    expected = torch.tensor([[[2.0, NAN], [5.0, 4.0]]], dtype=torch.float64)
    assert torch.allclose(found, expected, equal_nan=True, rtol=0, atol=0)


def test_drafts_rendered_unequally_often_are_a_mistake_of_the_plan() -> None:
    with pytest.raises(AssertionError, match="equally often"):
        compared_samples("denoising", column([1.0] * 6), drafts_of([2, 3, 1]))
    with pytest.raises(AssertionError, match="the same drafts"):
        compared_samples("tokens", column([1.0, 2.0], [3.0, 4.0]), torch.tensor([[0, 1], [0, 0]]))


@given(st.lists(st.lists(st.floats(-1e9, 1e9), min_size=4, max_size=4), min_size=1, max_size=3))
def test_drafts_rendered_once_keep_their_values_to_the_bit(groups: list[list[float]]) -> None:
    values = column(*groups)
    compared = compared_samples("tokens", values, drafts_of([1] * 4, groups=len(groups)))
    assert torch.equal(compared.values.view(torch.int64), values.view(torch.int64))
    assert compared.samples.flatten().tolist() == list(range(4 * len(groups)))


MISSING = math.nan
SUM, GATE = RewardTerm(), RewardTerm(role="gate")
BY_GROUP, BY_RUN = RewardTerm(normalize="group"), RewardTerm(normalize="running")


def computed(
    values: Any,
    *terms: RewardTerm,
    applies: Tensor | None = None,
    penalties: Tensor | None = None,
    running: RunningMoments | None = None,
    **options: Any,
) -> GroupAdvantages:
    """The sums less their mean, unless `options` say otherwise."""
    chosen = AdvantageSettings(**{"scale": "none", "eps": 0.0, **options})
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return compute_advantages(tensor, terms, chosen, applies=applies, penalties=penalties, running=running)


def close(found: Tensor, *rows: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(list(rows)).to(found.dtype), rtol=1e-5, atol=1e-6, equal_nan=True)


GATED = [[[0.2, 1.0], [0.4, 1.0], [0.6, 1.0], [0.8, 0.0]]]
# .2, .4, .6, 0: mean .3, std sqrt(.2 / 3). A gate after the mean would put the last at 0: third.
GATED_ADVANTAGES = [-0.387298, 0.387298, 1.161895, -1.161895]
NULL_GATE = [[[0.8, MISSING], [0.4, 1.0], [0.4, 0.5]]]


@pytest.mark.parametrize(
    ("values", "terms", "options", "expected"),
    [
        # -1, 0, 1 and, with mean 20 and std sqrt(600 / 2), -.577350, -.577350, 1.154701.
        ([[[0.0, 10.0], [1.0, 10.0], [2.0, 40.0]]], [BY_GROUP] * 2, {}, [-1.577350, -0.577350, 2.154701]),
        # Stds 1 and 2 plus .5: 3 (-1 / 1.5) - .5 (-2 / 2.5) = -1.6.
        (
            [[[0.0, 2.0], [1.0, 4.0], [2.0, 6.0]]],
            [RewardTerm(3.0, normalize="group"), RewardTerm(-0.5, normalize="group")],
            {"eps": 0.5},
            [-1.6, 0.0, 1.6],
        ),
        # -1, 0, 1 and null, -.707107, .707107; the first sample carries both weights on -1: sums -2, -.707, 1.707.
        (
            [[[1.0, MISSING], [3.0, 4.0], [5.0, 8.0]]],
            [BY_RUN] * 2,
            {"missing": "renormalize"},
            [-1.666667, -0.373773, 2.040440],
        ),
        # -.707107 and .707107 of the second reward; a null is the mean after normalisation, 0.
        ([[[0.0, MISSING], [1.0, 2.0], [5.0, 6.0]]], [SUM, BY_GROUP], {}, [-2.0, -1.707107, 3.707107]),
        (GATED, [BY_GROUP, GATE], {}, GATED_ADVANTAGES),
        (GATED, [SUM, GATE], {"scale": "group"}, GATED_ADVANTAGES),
        (GATED, [SUM, GATE], {"scale": "group", "aggregation": "normalize_then_sum"}, GATED_ADVANTAGES),
        # Factors .75, 1, .5 of rewards .8, .4, .4; left out it is 1.
        (NULL_GATE, [SUM, GATE], {}, [0.2, 0.0, -0.2]),
        (NULL_GATE, [SUM, GATE], {"missing": "renormalize"}, [1 / 3, -1 / 15, -4 / 15]),
        (NULL_GATE, [SUM, GATE], {"missing": "drop"}, [MISSING, 0.1, -0.1]),
    ],
)
def test_one_group_by_hand(
    values: Any, terms: list[RewardTerm], options: dict[str, Any], expected: list[float]
) -> None:
    close(computed(values, *terms, **options).advantages, expected)


def test_each_reward_as_its_own_term_says() -> None:
    """-.5 and .5 as they are; times the std of the group, sqrt(2) / 2: -.7071, .7071; (x - 10) / 20: -.25, .25."""
    values = [[[0.0, 4.0, 10.0], [1.0, 5.0, 20.0]]]
    terms = [SUM, BY_GROUP, RewardTerm(normalize="range", range=(10.0, 30.0))]
    result = computed(values, *terms)
    close(result.advantages, [-1.457107, 1.457107])
    assert result.rewards.tolist() == [[4.0, 6.5]]
    assert result.scaled.tolist() == [[[0.0, 4.0, 0.0], [1.0, 5.0, 0.5]]]


def test_by_running_moments() -> None:
    """0, 2, 4, 6: std sqrt(20 / 3). Then 3 and 13 beside them: squares 103.3333 over 5, std 4.546061."""
    first = computed([[[0.0], [2.0]], [[4.0], [6.0]]], BY_RUN)
    close(first.advantages, *[[-0.387298, 0.387298]] * 2)
    assert first.running == RunningMoments((4,), (3.0,), (20.0,))
    second = computed([[[3.0], [13.0]]], BY_RUN, running=first.running)
    close(second.advantages, [-1.099853, 1.099853])
    assert second.running.counts == (6,)
    assert second.running.means == pytest.approx((28 / 6,))
    assert second.running.squares == pytest.approx((310 / 3,))
    assert second.rewards.tolist() == [[3.0, 13.0]]


@pytest.mark.parametrize("missing", ["group_mean", "renormalize", "drop"])
def test_running_moments_are_of_what_was_scored(missing: str) -> None:
    """No null, no imputed value, nothing of another dataset; a sample that is dropped for a null was scored."""
    values = [[[0.25, 1.0, 7.0], [0.75, MISSING, 5.0]], [[1.0, 3.0, MISSING], [0.0, 8.0, MISSING]]]
    applies = torch.tensor([[True, True, False], [True, True, True]])
    terms = [SUM, RewardTerm(normalize="range", range=(0.0, 2.0)), RewardTerm(0.0)]
    result = computed(values, *terms, applies=applies, missing=missing)
    assert result.running == RunningMoments((4, 3, 0), (0.5, 2.0, 0.0), (0.625, 6.5, 0.0))


def test_nothing_known_by_running_moments_divides_nothing() -> None:
    """One value has no spread, and equal ones over many calls none but rounding."""
    running = None
    for _ in range(20):
        result = computed([[[0.1, 0.0], [0.1, 1.0], [0.1, 3.0]]], BY_RUN, SUM, running=running)
        running = result.running
        close(result.advantages, [-1.333333, -0.333333, 1.666667])
    lonely = computed([[[0.5, 0.0], [MISSING, 1.0]]], BY_RUN, SUM, missing="drop")
    assert lonely.advantages[0, 0] == 0.0


def test_a_gate_with_running_moments() -> None:
    """Of the rewards before the gate, .2 and .8: mean .5, std .424264; sums -.707107, then (.4 - .5) / .424264."""
    result = computed([[[0.2, 1.0], [0.8, 0.5]]], BY_RUN, GATE)
    close(result.advantages, [-0.235702, 0.235702])
    assert result.running.means == (pytest.approx(0.5), pytest.approx(0.75))


@pytest.mark.parametrize("gate", [GATE, RewardTerm(role="gate", threshold=0.5)])
def test_gates_that_shut_out_everybody_teach_nothing(gate: RewardTerm) -> None:
    for term in (SUM, BY_GROUP, BY_RUN):
        result = computed([[[0.2, 0.0], [0.9, 0.0]]], term, gate)
        assert result.advantages.tolist() == [[0.0, 0.0]]
        assert result.constant.tolist() == [True]


def test_a_shut_gate_holds_where_a_reward_is_null_and_the_others_are_equal() -> None:
    """.5, .5 and an imputed .5 behind a gate of 0: no spread among the known, and the third is below all the same."""
    values = [[[0.5, 0.1, 1.0], [0.5, 0.1, 1.0], [MISSING, 0.1, 0.0]]]
    for term in (SUM, BY_GROUP):
        found = computed(values, term, SUM, GATE).advantages[0]
        assert found[0] == found[1]
        assert found[2] < 0 < found[0]


def test_routing_with_gates() -> None:
    """The gate is for the first dataset alone; the third reward for the second alone."""
    values = [[[1.0, 0.0, MISSING], [0.5, 1.0, MISSING]], [[1.0, 0.0, 0.0], [0.5, 0.0, 2.0]]]
    applies = torch.tensor([[True, True, False], [True, False, True]])
    result = computed(values, SUM, GATE, SUM, applies=applies)
    assert result.rewards.tolist() == [[0.0, 0.5], [1.0, 2.5]]
    close(result.advantages, [-0.25, 0.25], [-0.75, 0.75])


def test_the_kl_stays_outside_gates_and_normalisation() -> None:
    """-.707107 - .1 x 2 and .707107 - .1 x 4, of absolute rewards 0 - .2 and 8 - .4."""
    penalties = torch.tensor([[2.0, 4.0]])
    result = computed([[[4.0, 0.0], [8.0, 1.0]]], BY_GROUP, GATE, penalties=penalties, kl_coef=0.1)
    close(result.advantages, [-0.607107, 0.607107])
    assert result.rewards.tolist() == [[pytest.approx(-0.2), pytest.approx(7.6)]]


def test_normalised_sums_that_cancel_are_no_spread() -> None:
    """A reward and its opposite, each over its own std: what is left is rounding, and eps is 0."""
    base = torch.tensor([0.1, 0.2, 0.4, 0.7, 0.35], dtype=torch.float64)
    values = torch.stack([base, 3 - 7 * base], -1).unsqueeze(0)
    for terms in ([BY_GROUP, BY_GROUP], [BY_RUN, BY_RUN], [RewardTerm(7.0), SUM]):
        result = computed(values, *terms, scale="group")
        assert result.constant.tolist() == [True]
        assert result.advantages.tolist() == [[0.0] * 5]


UNIT = st.integers(0, 8).map(lambda eighths: eighths / 8)
MAYBE = st.one_of(UNIT, UNIT, UNIT, st.just(MISSING))
ROWS = st.lists(st.lists(st.tuples(MAYBE, MAYBE, MAYBE, MAYBE), min_size=4, max_size=4), min_size=1, max_size=3)
KINDS = st.sampled_from(["none", "group", "running", "range"])
VARIANTS = st.sampled_from(
    [
        {"scale": "none"},
        {"scale": "group"},
        {"scale": "batch", "baseline": "leave_one_out"},
        {"scale": "group", "aggregation": "normalize_then_sum"},
    ]
)


def terms_of(kind: Any, options: dict[str, Any]) -> list[RewardTerm]:
    """Two rewards, a gate by its value and one with a threshold."""
    bounds = (0.0, 2.0) if kind == "range" else None
    gdpo = options.get("aggregation") == "normalize_then_sum" and kind != "range"
    one = RewardTerm(0.7, normalize="none" if gdpo else kind, range=bounds)
    return [one, RewardTerm(0.3), GATE, RewardTerm(role="gate", threshold=0.5)]


@settings(max_examples=50)
@given(kind=KINDS, options=VARIANTS, values=ROWS)
def test_a_sample_is_never_above_one_with_no_smaller_rewards_and_gates(
    kind: str, options: dict[str, Any], values: Any
) -> None:
    """Imputed values among them. Above all: one that was gated out never above one with the same rewards that was not.

    Without imputation samples are compared by different weights, and nothing of the kind holds.
    """
    result = computed(values, *terms_of(kind, options), **options)
    scaled = result.scaled.nan_to_num(nan=0.0)
    for group, present in enumerate(result.present.tolist()):
        siblings = [number for number, there in enumerate(present) if there]
        for low, high in itertools.permutations(siblings, 2):
            if (scaled[group, low] <= scaled[group, high] + 1e-12).all():
                advantages = result.advantages[group]
                assert advantages[low] <= advantages[high] + 1e-5 * (1 + advantages[high].abs())


@given(
    missing=st.sampled_from(["group_mean", "renormalize", "drop"]),
    kind=KINDS,
    options=VARIANTS,
    values=ROWS,
    shuffler=st.randoms(use_true_random=False),
)
def test_order_of_siblings_and_groups_does_not_matter(
    missing: str, kind: str, options: dict[str, Any], values: Any, shuffler: Random
) -> None:
    samples = torch.tensor(values, dtype=torch.float64)
    groups, siblings = list(range(len(values))), list(range(4))
    shuffler.shuffle(groups)
    shuffler.shuffle(siblings)
    arguments: dict[str, Any] = {**options, "missing": missing}
    straight = computed(samples, *terms_of(kind, options), **arguments)
    shuffled = computed(samples[groups][:, siblings], *terms_of(kind, options), **arguments)
    for field in ("advantages", "rewards", "scaled"):
        there, back = getattr(straight, field)[groups][:, siblings], getattr(shuffled, field)
        torch.testing.assert_close(back, there, rtol=1e-5, atol=1e-5, equal_nan=True)
