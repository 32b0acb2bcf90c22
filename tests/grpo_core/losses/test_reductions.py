"""Every reduction by hand over one small table, with its denominator."""

import pytest
import torch

from grpo_core.losses import LOSSES, Denominators

VALUES = torch.tensor([[1.0, 3.0, 5.0], [8.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # Row sums 9, 8, 0 over lengths 3, 1, 0; 5 rows and 10 tokens in the minibatch, 20 and 50 in the rollout set.
        ("grpo", (3 + 8) / 5),
        ("sapo", (3 + 8) / 5),
        ("gspo", (3 + 8) / 5),
        ("bnpo", 17 / 10),
        ("dr_grpo", 17 / (5 * 7)),
        ("dapo", 17 / (50 * 5 / 20)),
        ("cispo", 17 / (50 * 5 / 20)),
        ("vespo", 17 / (50 * 5 / 20)),
        ("luspo", 17 / 5),
    ],
)
def test_by_hand(loss: str, expected: float) -> None:
    denominators = Denominators(
        rows=5, tokens=10, entropy_tokens=4, rollout_rows=20, rollout_tokens=50, max_completion_length=7
    )
    assert float(LOSSES[loss].reduction(VALUES, MASK, denominators)) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_a_minibatch_without_tokens_is_zero(loss: str) -> None:
    denominators = Denominators(3, 0, 0, 3, 0, 7)
    assert float(LOSSES[loss].reduction(VALUES * torch.nan, torch.zeros(3, 3).bool(), denominators)) == 0.0


@pytest.mark.parametrize(
    "counts",
    [
        {"rows": 0},
        {"rows": 9},
        {"tokens": 51},
        {"tokens": 3},
        {"entropy_tokens": -1},
        {"max_completion_length": 0},
    ],
)
def test_counts_that_cannot_be_are_refused(counts: dict[str, int]) -> None:
    possible = {
        "rows": 5,
        "tokens": 10,
        "entropy_tokens": 4,
        "rollout_rows": 8,
        "rollout_tokens": 50,
        "max_completion_length": 7,
    }
    Denominators(**possible)
    with pytest.raises(AssertionError):
        Denominators(**possible | counts)
