"""Which tokens the masks leave, by hand and for any numbers."""

import math

import pytest
import torch

from grpo_core.losses import entropy_threshold, high_entropy_mask, on_policy_rows

MASK = torch.tensor([[True, True, True], [True, True, False]])


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
