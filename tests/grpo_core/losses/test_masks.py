"""Which tokens the masks leave, by hand and for any numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.losses import entropy_threshold, high_entropy_mask, on_policy_rows, overlong_mask

MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_overlong_rows_leave_no_token() -> None:
    assert overlong_mask(MASK, torch.tensor([False, True])).tolist() == [[False] * 3, [True, True, False]]


def test_entropy_threshold_by_hand() -> None:
    """Of 0, 1, 2, 3, 4 the top 2/5 begin at the 0.6 quantile, 2.4; the top half at 2; all at 0."""
    entropies = torch.tensor([3.0, 0.0, 4.0, 1.0, 2.0])
    assert entropy_threshold(entropies, 0.4) == pytest.approx(2.4)
    assert entropy_threshold(entropies, 0.5) == 2.0
    assert entropy_threshold(entropies, 1.0) == 0.0
    assert entropy_threshold(torch.zeros(0), 0.2) == 0.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="part of the tokens to keep"):
        entropy_threshold(torch.ones(3), share)


@given(st.lists(st.floats(0, 12, width=32), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_entropy_threshold_is_the_quantile(entropies: list[float], share: float) -> None:
    expected = float(np.quantile(np.asarray(entropies), 1 - share))
    assert entropy_threshold(torch.tensor(entropies), share) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(st.lists(st.floats(0, 12, width=32), min_size=1, max_size=60, unique=True), st.floats(0.01, 1.0))
def test_the_share_of_tokens_stays(entropies: list[float], share: float) -> None:
    """Between one less and one more than share * tokens: the quantile falls on or between two of them."""
    values = torch.tensor([entropies])
    mask = torch.ones_like(values).bool()
    kept = int(high_entropy_mask(values, mask, threshold=entropy_threshold(values[0], share)).sum())
    assert share * len(entropies) - 1 <= kept <= share * len(entropies) + 1


def test_high_entropy_mask_by_hand() -> None:
    """At the threshold a token stays; beyond the loss mask none does."""
    entropy = torch.tensor([[0.5, 1.0, 2.0], [0.9, 1.1, 9.0]])
    found = high_entropy_mask(entropy, MASK, threshold=1.0)
    assert found.tolist() == [[False, True, True], [False, True, False]]


@pytest.mark.parametrize(
    ("advantage", "drift", "kept"),
    [(-1.0, 0.6, False), (-1.0, 0.5, True), (-1.0, -3.0, True), (1.0, 3.0, True), (0.0, 3.0, True)],
)
def test_on_policy_rows_by_hand(advantage: float, drift: float, kept: bool) -> None:
    """Mean drift over the row's two tokens against a threshold of 0.5; the masked third is not seen."""
    sampling = torch.tensor([[2 * drift, 0.0, 1e9]])
    rows = on_policy_rows(torch.zeros(1, 3), sampling, torch.tensor([advantage]), MASK[1:], threshold=0.5)
    assert rows.tolist() == [kept]


def test_a_row_without_tokens_has_not_drifted() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    rows = on_policy_rows(
        torch.zeros(1, 2), torch.full((1, 2), torch.inf), torch.tensor([-1.0]), nothing, threshold=0.1
    )
    assert rows.tolist() == [True]
