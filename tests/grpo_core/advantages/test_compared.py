"""Which samples are compared for each stream, against values worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.advantages import AdvantageSettings, compared_samples, compute_advantages
from grpo_core.rewards.mix.terms import RewardTerm

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


def test_advantages_of_uneven_groups() -> None:
    """Means 58 / 12 of the drafts and 3 of the renderings, whose Bessel-corrected deviation is sqrt(2.5)."""
    drafts = drafts_of([5] + [1] * 11)
    values = column([1.0, 2.0, 3.0, 4.0, 5.0, *range(11)])
    settings, terms = AdvantageSettings(scale="none"), [RewardTerm()]
    tokens = compute_advantages(compared_samples("tokens", values, drafts).values, terms, settings)
    expected = [3 - 58 / 12, *(value - 58 / 12 for value in range(11))]
    assert tokens.advantages[0].tolist() == pytest.approx(expected, abs=1e-6)
    settings = AdvantageSettings(eps=0.0)
    denoising = compute_advantages(compared_samples("denoising", values, drafts).values, terms, settings)
    expected = [place / 2.5**0.5 for place in (-2, -1, 0, 1, 2)]
    assert denoising.advantages[0].tolist() == pytest.approx(expected, abs=1e-6)


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
