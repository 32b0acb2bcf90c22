"""Group-relative advantages: TRL's numbers, and what must hold for any rewards."""

import math
import statistics
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.advantages import compute_advantages
from grpo_core.errors import NonFiniteError

NAN = math.nan
REWARDS = st.floats(-100, 100, width=32)
GROUPS = st.lists(REWARDS, min_size=2, max_size=8)


def advantages_of(*rewards: float, normalize_std: bool = True, eps: float = 1e-4) -> list[float]:
    group = torch.tensor([rewards], dtype=torch.float64)
    found: list[float] = compute_advantages(group, normalize_std=normalize_std, eps=eps).advantages[0].tolist()
    return found


def test_the_values_of_trl() -> None:
    """mean .5, std sqrt(1/3) = .5773503: .5 / (.5773503 + .0001) = .865875."""
    assert advantages_of(1, 0, 0, 1) == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6)


def test_a_smaller_eps() -> None:
    assert advantages_of(1, 0, 0, 1, eps=1e-6) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_without_the_standard_deviation() -> None:
    assert advantages_of(3, 1, 2, normalize_std=False) == pytest.approx([1, -1, 0])


def test_each_group_has_its_own_statistics() -> None:
    """A hard prompt's best sample is not punished for an easy prompt's scores."""
    result = compute_advantages(torch.tensor([[0.0, 0.1], [10.0, 10.1]], dtype=torch.float64), eps=0.0)
    root = math.sqrt(0.5)
    torch.testing.assert_close(result.advantages, torch.tensor([[-root, root], [-root, root]]))
    torch.testing.assert_close(result.means, torch.tensor([0.05, 10.05]))
    torch.testing.assert_close(result.stds, torch.full((2,), 0.1 * root))
    assert result.constant.tolist() == [False, False]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e-30, 1e6 + 0.1, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_a_constant_group_is_exactly_zero(size: int, value: float, dtype: torch.dtype, eps: float) -> None:
    """The mean of three 0.1 is not 0.1 in binary; divided by a tiny eps that would be an advantage."""
    result = compute_advantages(torch.full((1, size), value, dtype=dtype), eps=eps)
    assert result.advantages.tolist() == [[0.0] * size]
    assert result.stds.tolist() == [0.0]
    assert result.constant.tolist() == [True]


def test_missing_rewards_count_in_no_statistic() -> None:
    """Over 1, 0, 0, 1 the values of TRL, whatever stands between them."""
    found = advantages_of(1, NAN, 0, 0, NAN, 1)
    assert [math.isnan(value) for value in found] == [False, True, False, False, True, False]
    assert [found[index] for index in (0, 2, 3, 5)] == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875])


def test_a_group_with_one_reward_teaches_nothing() -> None:
    result = compute_advantages(torch.tensor([[NAN, 5.0, NAN]]))
    assert result.advantages[0, 1] == 0.0
    assert result.advantages[0, [0, 2]].isnan().all()
    assert (result.means.item(), result.stds.item(), result.constant.item()) == (5.0, 0.0, True)


def test_a_group_without_rewards_has_no_mean() -> None:
    result = compute_advantages(torch.tensor([[NAN, NAN], [0.0, 1.0]]))
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
    with pytest.raises(NonFiniteError, match="reward is not finite for 1 sample") as caught:
        compute_advantages(torch.tensor([[0.0, 1.0], [NAN, value]]))
    assert caught.value.sample_ids == ("1/1",)


@given(GROUPS)
def test_agrees_with_the_standard_library(rewards: list[float]) -> None:
    std = statistics.stdev(rewards)
    expected = [0.0 if std == 0 else (reward - statistics.fmean(rewards)) / (std + 1e-4) for reward in rewards]
    assert advantages_of(*rewards) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@given(GROUPS)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert math.fsum(advantages_of(*rewards)) == pytest.approx(0, abs=1e-5)


@given(GROUPS, st.randoms(use_true_random=False))
def test_order_of_the_siblings_does_not_matter(rewards: list[float], shuffler: Random) -> None:
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    straight = advantages_of(*rewards)
    assert advantages_of(*(rewards[index] for index in order)) == pytest.approx(
        [straight[index] for index in order], abs=1e-6
    )


@given(GROUPS, st.floats(-1000, 1000, width=32))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    assert advantages_of(*(reward + shift for reward in rewards)) == pytest.approx(
        advantages_of(*rewards), rel=1e-3, abs=1e-5
    )


@given(GROUPS)
def test_a_better_reward_never_has_the_smaller_advantage(rewards: list[float]) -> None:
    found = advantages_of(*rewards)
    pairs = sorted(zip(rewards, found, strict=True))
    assert [advantage for _, advantage in pairs] == sorted(found)
