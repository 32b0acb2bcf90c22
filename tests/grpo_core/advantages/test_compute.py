"""What is refused, by the key of the configuration."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.advantages.compute import GroupAdvantages, compute_advantages, kl_penalty, reward_metrics
from grpo_core.advantages.settings import AdvantageSettings, refuse_terms
from grpo_core.errors import InputError, NonFiniteError
from grpo_core.losses.settings import KlEstimator
from grpo_core.rewards.registry import RewardTerm

GDPO = {"aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("eps", {"eps": -1e-9}),
        ("eps", {"eps": math.nan}),
        ("kl_coef", {"kl_coef": -0.1}),
        ("kl_coef", {"kl_coef": math.inf}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": math.nan}),
        ("baseline", {**GDPO, "baseline": "leave_one_out"}),
        ("scale", {**GDPO, "scale": "none"}),
        ("scale", {**GDPO, "scale": "batch"}),
        ("kl_coef", {**GDPO, "kl_coef": 0.1}),
    ],
)
def test_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        AdvantageSettings(**options)
    assert caught.value.place == f"advantages.{field}"
    assert str(caught.value.value) == str(options[field])


def test_the_limits_themselves_are_allowed() -> None:
    settings = AdvantageSettings(eps=0.0, kl_coef=0.0, clip=1e-9, baseline="leave_one_out", scale="batch")
    assert settings.clip == 1e-9


@pytest.mark.parametrize("normalize", ["group", "running"])
def test_a_reward_is_not_normalised_twice(normalize: Any) -> None:
    terms = [RewardTerm(), RewardTerm(normalize=normalize)]
    refuse_terms(terms, AdvantageSettings())
    with pytest.raises(InputError) as caught:
        refuse_terms(terms, AdvantageSettings(**GDPO))
    assert (caught.value.place, caught.value.value) == ("rewards.1.normalize", normalize)


def test_a_fixed_range_is_no_second_normalisation() -> None:
    terms = [RewardTerm(normalize="range", range=(0.0, 10.0)), RewardTerm(role="gate")]
    refuse_terms(terms, AdvantageSettings(**GDPO))


@pytest.mark.parametrize(
    ("terms", "value"),
    [
        ([], []),
        ([RewardTerm(0.0)], [0.0]),
        ([RewardTerm(role="gate")], ["gate"]),
        ([RewardTerm(role="gate"), RewardTerm(0.0)], ["gate", 0.0]),
    ],
)
def test_a_mix_that_adds_nothing_is_refused(terms: list[RewardTerm], value: list[object]) -> None:
    with pytest.raises(InputError) as caught:
        refuse_terms(terms, AdvantageSettings())
    assert (caught.value.place, caught.value.value) == ("rewards", value)


NAN = math.nan
REWARDS = st.floats(-100, 100, width=32)
SAMPLES = st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=4, max_size=4), min_size=1, max_size=4)
SCALES = ["group", "batch", "none"]


def computed(values: Any, weights: Sequence[float] = (1.0,), **options: Any) -> GroupAdvantages:
    """Of nested lists or a tensor; without a last axis there is one reward."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return compute_advantages(
        tensor.unsqueeze(-1) if tensor.ndim == 2 else tensor, weighted(*weights), AdvantageSettings(**options)
    )


def weighted(*weights: float) -> list[RewardTerm]:
    return [RewardTerm(weight) for weight in weights]


def advantages_of(*rewards: float, **options: Any) -> list[float]:
    """Of one group with one reward."""
    found: list[float] = computed([rewards], **options).advantages[0].tolist()
    return found


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        # Mean .5, std sqrt(1/3) = .5773503: .5 / (.5773503 + .0001) = .865875; missing rewards change no statistic.
        ((1, 0, 0, 1), {}, [0.865875, -0.865875, -0.865875, 0.865875]),
        ((1, NAN, 0, 0, NAN, 1), {}, [0.865875, NAN, -0.865875, -0.865875, NAN, 0.865875]),
        ((1, 0, 0, 1), {"eps": 1e-6}, [0.866024, -0.866024, -0.866024, 0.866024]),
        ((3, 1, 2), {"scale": "none"}, [1, -1, 0]),
        ((-4, -1, 0, 5), {"scale": "none", "clip": 2.0}, [-2, -1, 0, 2]),
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; over the std, sqrt((4 + 1 + 9) / 2).
        ((1, NAN, 2, 6), {"baseline": "leave_one_out", "scale": "none"}, [-3, NAN, -1.5, 4.5]),
        ((1, 2, 6), {"baseline": "leave_one_out", "eps": 0.0}, [value / math.sqrt(7) for value in (-3, -1.5, 4.5)]),
    ],
)
def test_one_group_by_hand(rewards: tuple[float, ...], options: dict[str, Any], expected: list[float]) -> None:
    assert advantages_of(*rewards, **options) == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("options", [{}, {"eps": 0.0}, {"eps": 0.0, "baseline": "leave_one_out"}])
def test_a_constant_group_is_exactly_zero(options: dict[str, Any]) -> None:
    """The mean of three 0.1 is not 0.1 in binary; divided by a tiny eps that would be an advantage."""
    values = (0.0, 0.1, 1 / 3, -1e-30, 1e6 + 0.1, 3e38)
    for size, value, dtype in itertools.product((1, 2, 3, 7, 64), values, (torch.float32, torch.float64)):
        result = computed(torch.full((1, size), value, dtype=dtype), **options)
        assert result.advantages.tolist() == [[0.0] * size], (value, dtype)
        assert result.stds.tolist() == [0.0]
        assert result.constant.tolist() == [True]


@pytest.mark.parametrize("scale", SCALES)
def test_the_same_rewards_in_another_order_are_no_spread(scale: str) -> None:
    """.1 + .2 + .3 and .3 + .2 + .1 differ in the last bit; without eps that would be a full advantage."""
    result = computed([[[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]], [1.0, 1.0, 1.0], scale=scale, eps=0.0)
    assert result.rewards[0, 0] != result.rewards[0, 1]
    assert result.advantages.tolist() == [[0.0, 0.0]]
    assert result.constant.tolist() == [True]


@pytest.mark.parametrize("missing", ["group_mean", "renormalize"])
def test_a_constant_group_stays_zero_when_the_batch_mean_is_not(missing: str) -> None:
    """The last step of normalize_then_sum subtracts one mean from every sample, those of constant groups too."""
    values = [[[0.3, 0.7]] * 3, [[0.0, NAN], [1.0, 5.0], [4.0, 9.0]]]
    found = computed(values, [1.0, 1.0], aggregation="normalize_then_sum", missing=missing).advantages
    assert found[0].tolist() == [0.0] * 3
    assert found[1].abs().min() > 0


def test_dropped_groups_are_not_trained_and_touch_no_statistic() -> None:
    values = [[5.0, 5.0], [0.0, 1.0], [NAN, 3.0], [0.0, 4.0]]
    dropped = computed(values, scale="batch", constant_groups="drop")
    assert dropped.dropped.tolist() == [True, False, True, False]
    assert dropped.advantages[[0, 2]].isnan().all()
    alone = computed([[0.0, 1.0], [0.0, 4.0]], scale="batch")
    assert dropped.advantages[[1, 3]].tolist() == alone.advantages.tolist()
    kept = computed(values, scale="batch")
    assert not kept.dropped.any()
    assert kept.advantages[0].tolist() == [0.0, 0.0]
    assert kept.advantages[1, 1] != dropped.advantages[1, 1]


def test_the_kl_is_part_of_the_reward() -> None:
    """1 - .1 * 2, 0 - .1 * (-3), and their mean .55."""
    values = torch.tensor([[[1.0], [0.0]]])
    settings = AdvantageSettings(kl_coef=0.1, scale="none")
    result = compute_advantages(values, weighted(1.0), settings, penalties=torch.tensor([[2.0, -3.0]]))
    torch.testing.assert_close(result.rewards, torch.tensor([[0.8, 0.3]]))
    torch.testing.assert_close(result.means, torch.tensor([0.55]))
    torch.testing.assert_close(result.advantages, torch.tensor([[0.25, -0.25]]))


def test_a_kl_in_the_reward_without_penalties_is_refused() -> None:
    with pytest.raises(ValueError, match="penalties"):
        computed([[0.0, 1.0]], kl_coef=0.1)


def test_a_kl_that_is_not_finite_names_the_sample_if_it_has_a_reward() -> None:
    values = torch.tensor([[[1.0], [0.0]], [[NAN], [1.0]]])
    settings = AdvantageSettings(kl_coef=0.1)
    result = compute_advantages(values, weighted(1.0), settings, penalties=torch.tensor([[0.0, 0.0], [NAN, 0.0]]))
    assert result.advantages.isnan().nonzero().tolist() == [[1, 0]]
    with pytest.raises(NonFiniteError) as caught:
        compute_advantages(values, weighted(1.0), settings, penalties=torch.tensor([[0.0, 0.0], [NAN, math.inf]]))
    assert (caught.value.quantity, caught.value.sample_ids) == ("KL in the reward", ("1/1",))


def test_each_way_with_a_missing_reward() -> None:
    """The second of two rewards is null for the first sample; the siblings have 4 and 2.

    Imputed 3: sums 3, 5, 4. Renormalised: twice the first reward, 0, 5, 4. Dropped: 5, 4.
    """
    values = [[[0.0, NAN], [1.0, 4.0], [2.0, 2.0]]]
    found = {
        missing: computed(values, [1.0, 1.0], missing=missing, scale="none")
        for missing in ("group_mean", "renormalize", "drop")
    }
    torch.testing.assert_close(found["group_mean"].advantages, torch.tensor([[-1.0, 1.0, 0.0]]))
    torch.testing.assert_close(found["renormalize"].advantages, torch.tensor([[-3.0, 2.0, 1.0]]))
    torch.testing.assert_close(found["drop"].advantages, torch.tensor([[NAN, 0.5, -0.5]]), equal_nan=True)
    assert [int(result.imputed.sum()) for result in found.values()] == [1, 0, 0]
    assert [int(result.present.sum()) for result in found.values()] == [3, 3, 2]


def test_a_group_is_not_rescaled_for_the_rewards_of_another_dataset() -> None:
    values = torch.tensor([[[0.0, NAN], [1.0, NAN]], [[NAN, 0.0], [NAN, 8.0]]])
    routed = torch.tensor([[True, False], [False, True]])
    settings = AdvantageSettings(scale="none")
    result = compute_advantages(values, weighted(1.0, 0.5), settings, applies=routed)
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.5, 0.5], [-2.0, 2.0]]))
    assert compute_advantages(values, weighted(1.0, 0.5), settings).advantages[0].tolist() == [-0.75, 0.75]


def test_a_reward_of_another_dataset_alone_leaves_a_group_its_advantages() -> None:
    """Normalised by group, a reward that is null for all of it has no mean, and the other one decides alone."""
    values = torch.tensor([[[0.0, NAN], [1.0, NAN]], [[0.0, 0.0], [1.0, 8.0]]])
    terms = [RewardTerm(1.0, normalize="group"), RewardTerm(1.0, normalize="group")]
    found = compute_advantages(values, terms, AdvantageSettings()).advantages
    assert found.tolist() == [pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)] * 2


def test_equal_rewards_beside_a_missing_one_are_a_constant_group() -> None:
    found = computed([[0.5, 0.5, NAN]], missing="drop", constant_groups="drop")
    assert (found.constant.tolist(), found.dropped.tolist()) == ([True], [True])
    assert reward_metrics(found)["frac_reward_zero_std"] == 1.0


def test_a_group_with_one_reward_teaches_nothing() -> None:
    result = computed([[NAN, 5.0, NAN]])
    assert result.advantages[0, 1] == 0.0
    assert result.advantages[0, [0, 2]].isnan().all()
    assert (result.means.item(), result.stds.item(), result.constant.item()) == (5.0, 0.0, True)


def test_a_group_without_rewards_has_no_mean() -> None:
    result = computed([[NAN, NAN], [0.0, 1.0]])
    assert result.advantages[0].isnan().all()
    assert result.means.isnan().tolist() == [True, False]
    assert result.constant.tolist() == [True, False]
    assert not result.advantages[1].isnan().any()


def test_small_differences_on_a_huge_offset() -> None:
    """Differences of a hundredth on a million, in fp64, keep four digits."""
    small = advantages_of(0.00, 0.01, 0.03, 0.02)
    large = advantages_of(1e6, 1e6 + 0.01, 1e6 + 0.03, 1e6 + 0.02)
    assert large == pytest.approx(small, rel=1e-4)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused_by_name(value: float) -> None:
    with pytest.raises(NonFiniteError) as caught:
        computed([[0.0, 1.0], [NAN, value]])
    assert (caught.value.quantity, caught.value.sample_ids) == ("reward", ("1/1",))


def test_one_reward_has_a_mean_and_no_spread() -> None:
    metrics = reward_metrics(computed([[2.0, NAN]]))
    assert metrics["reward"] == 2.0
    assert "reward_std" not in metrics


def test_metrics_by_hand() -> None:
    """Rewards 5, 5, 1, 2 + imputed 3 and 4 + 3: over 5, 5, 5, 7 the mean is 5.5, the std 1."""
    values = [[[2.0, 3.0], [2.0, 3.0]], [[2.0, NAN], [4.0, 3.0]], [[NAN, NAN], [NAN, NAN]]]
    metrics = reward_metrics(computed(values, [1.0, 1.0], constant_groups="drop"))
    assert metrics == {
        "reward": 5.5,
        "reward_std": 1.0,
        "frac_reward_zero_std": pytest.approx(2 / 3),
        "groups_dropped": 2.0,
        "groups_kept": 1.0,
        "samples_without_reward": 2.0,
        "rewards_imputed": 1.0,
    }


@pytest.mark.parametrize("scale", SCALES)
@given(values=SAMPLES)
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_1(scale: str, values: Any) -> None:
    mean, others = (
        computed(values, [1.0, -0.5], baseline=name, scale=scale).advantages for name in ("mean", "leave_one_out")
    )
    torch.testing.assert_close(others, mean * 4 / 3, rtol=1e-6, atol=1e-7)


LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, math.nan, 7.0]])
REFERENCE = torch.tensor([[-1.5, -1.0, -9.0], [-0.5 + math.log(2), 1.0, math.inf]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("k1", 0.5 - 1.0, -math.log(2)),
        ("k2", (0.25 + 1.0) / 2, math.log(2) ** 2 / 2),
        ("k3", (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1), 2 - math.log(2) - 1),
    ],
)
def test_the_sum_over_trained_tokens(estimator: KlEstimator, first: float, second: float) -> None:
    """Differences .5 and -1 in the first row, -log 2 in the second; what is masked may be anything."""
    assert kl_penalty(LOGPROBS, REFERENCE, MASK, estimator=estimator).tolist() == pytest.approx([first, second])
