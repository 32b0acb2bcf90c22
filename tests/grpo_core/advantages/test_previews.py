"""Seeds that previews choose: which ones, how far ranks can be trusted, and what standardising such a group does."""

import math

import polars as pl
import pytest
import torch
from torch import Tensor

from grpo_core.advantages.compute import compute_advantages
from grpo_core.advantages.previews import average_ranks, rank_correlation, select_extremes
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.registry import RewardTerm

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "best", "worst", "chosen"),
    [
        ([3.0, 1.0, 2.0, 5.0, 4.0], 2, 1, [1, 3, 4]),
        # Of equal ones the first is the better, so the last is the worst.
        ([1.0, 1.0, 1.0, 1.0], 1, 1, [0, 3]),
        ([2.0, 1.0, 2.0, 1.0, 1.0], 1, 2, [0, 3, 4]),
        ([NAN, 1.0, NAN, 3.0, 2.0], 1, 2, [1, 3, 4]),
        # Only where too few are known, the first of the others.
        ([NAN, 1.0, NAN, NAN, 2.0], 2, 1, [1, 3, 4]),
        ([NAN, 1.0, NAN, NAN, 2.0], 1, 2, [1, 3, 4]),
        ([NAN, NAN, NAN], 1, 1, [0, 2]),
        ([1.0, 2.0], 1, 1, [0, 1]),
    ],
)
def test_the_best_and_the_worst_are_chosen(values: list[float], best: int, worst: int, chosen: list[int]) -> None:
    assert select_extremes(torch.tensor(values), best, worst) == chosen


def test_equal_values_share_their_mean_rank() -> None:
    found = average_ranks(torch.tensor([[5.0, 1.0, 5.0, 0.0], [2.0, NAN, 2.0, 2.0]]))
    assert found.nan_to_num(-1).tolist() == [[3.5, 2.0, 3.5, 1.0], [2.0, -1.0, 2.0, 2.0]]


def test_of_all_previews_it_is_the_correlation_of_ranks() -> None:
    generator = torch.Generator().manual_seed(1)
    previews, full = torch.randint(0, 6, (2, 4, 9), generator=generator).double()
    found = rank_correlation(average_ranks(-previews), full, 9)
    for ours, theirs, value in zip(previews, full, found, strict=True):
        table = pl.DataFrame({"ours": ours.numpy(), "theirs": theirs.numpy()})
        assert float(value) == pytest.approx(table.select(pl.corr("ours", "theirs", method="spearman")).item())


def chosen_of(count: int, best: int, worst: int, correlation: float) -> tuple[Tensor, Tensor, Tensor]:
    """Previews and full rewards of normal groups with this correlation, and the indices of the chosen ones."""
    generator = torch.Generator().manual_seed(2)
    previews, noise = torch.randn(2, 2000, count, generator=generator, dtype=torch.float64)
    full = correlation * previews + math.sqrt(1 - correlation**2) * noise
    order = previews.argsort(-1, descending=True)
    return previews, full, torch.cat([order[:, :best], order[:, count - worst :]], -1)


@pytest.mark.parametrize(("correlation", "too_high"), [(0.4, 0.15), (0.6, 0.12), (0.8, 0.05)])
def test_from_the_chosen_ones_it_is_estimated_for_all(correlation: float, too_high: float) -> None:
    previews, full, chosen = chosen_of(32, 4, 4, correlation)
    ranks = average_ranks(-previews)
    truth = rank_correlation(ranks, full, 32).mean()
    kept_ranks, kept = ranks.gather(-1, chosen), full.gather(-1, chosen)
    estimate = rank_correlation(kept_ranks, kept, 32).mean()
    assert float(estimate) == pytest.approx(float(truth), abs=0.06)
    # As if the chosen ones were all that there are.
    plain = rank_correlation(average_ranks(kept_ranks), kept, 8).mean()
    assert plain > truth + too_high


def test_without_a_difference_there_is_no_correlation() -> None:
    ranks = torch.tensor([[1.0, 2.0, 7.0, 8.0]] * 3)
    ranks[1] = 4.5
    full = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = rank_correlation(ranks, full, 8)
    assert found.isnan().tolist() == [False, True, True]
    assert float(found[0]) == pytest.approx(1)


def push(rewards: Tensor, actions: Tensor) -> tuple[float, float]:
    """The mean of A grad log N(action; mean, 1), by the mean and, for a deviation of 1, by the deviation."""
    result = compute_advantages(rewards.unsqueeze(-1), [RewardTerm()], AdvantageSettings(eps=0.0))
    advantages = result.advantages.double()
    assert advantages.sum(-1).abs().max() < 1e-4, "what is not trained has no part in the balance"
    return float((advantages * actions).mean()), float((advantages * (actions.square() - 1)).mean())


def test_a_chosen_group_pushes_where_the_whole_group_does_and_further() -> None:
    """Actions of a normal policy with their value as the reward; previews that rank them exactly, and less so."""
    actions, _, chosen = chosen_of(32, 4, 4, 1.0)
    whole, spread = push(actions, actions)
    kept = actions.gather(-1, chosen)
    further, kept_spread = push(kept, kept)
    assert (spread, kept_spread) == (pytest.approx(0, abs=0.03), pytest.approx(0, abs=0.03))
    assert further / whole == pytest.approx(1.58, abs=0.01)
    _, actions, chosen = chosen_of(32, 4, 4, 0.6)
    kept = actions.gather(-1, chosen)
    assert push(kept, kept)[0] / whole == pytest.approx(1.18, abs=0.01)


@pytest.mark.parametrize(("best", "worst", "sign"), [(6, 2, -1), (2, 6, 1)])
def test_more_of_the_best_narrow_the_policy_and_more_of_the_worst_widen_it(best: int, worst: int, sign: int) -> None:
    actions, _, chosen = chosen_of(32, best, worst, 1.0)
    kept = actions.gather(-1, chosen)
    assert push(kept, kept)[1] * sign > 0.3
