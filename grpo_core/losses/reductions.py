"""From a value a token to one number, each with its denominator.

A denominator is counted over the whole minibatch (or over the whole rollout set), never over a microbatch: the losses
of the microbatches then add up to the minibatch's, however it was split.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LossName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "luspo", "vespo"]


@dataclass(frozen=True)
class Denominators:
    """Counts over all microbatches and all processes.

    Where gradients are averaged over processes (DDP, FSDP), each process multiplies its loss by their number.

    Attributes:
        rows: of the minibatch, rows without trained tokens included.
        tokens: trained tokens of the minibatch.
        entropy_tokens: those of them that the entropy bonus is taken over: all, or the entropy mask's.
        rollout_rows: of all minibatches of an epoch together.
        rollout_tokens: trained tokens of all minibatches of an epoch together.
        max_completion_length: the most tokens that a row could have.
    """

    rows: int
    tokens: int
    entropy_tokens: int
    rollout_rows: int
    rollout_tokens: int
    max_completion_length: int

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.rollout_rows, "a minibatch has rows, and all of them are rows of the rollout set"
        assert 0 <= self.entropy_tokens <= self.tokens <= self.rollout_tokens, "tokens of a part within the whole"
        assert self.max_completion_length >= 1, "a row can have a token"

    @property
    def expected_tokens(self) -> float:
        """The rollout set's tokens shared out by rows: what a minibatch of these many rows has on average."""
        return self.rollout_tokens * self.rows / self.rollout_rows


def masked_sum(values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, ""]:
    """Sum over the masked tokens."""
    return torch.where(mask, values, 0.0).sum()


def mean_of_row_means(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, rows: int
) -> Float[Tensor, ""]:
    """Sum over rows of (sum of the row's masked values / the row's masked length), divided by `rows`.

    GRPO (arXiv:2402.03300), equation 3. A row without a masked token contributes zero.
    """
    lengths = mask.sum(-1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(-1) / lengths).sum() / rows


def token_mean(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, tokens: float
) -> Float[Tensor, ""]:
    """Sum over tokens divided by `tokens`: a long row counts for more than a short one.

    With the minibatch's own tokens this is bnpo; with its expected share of the rollout set's it is DAPO's
    (arXiv:2503.14476, equation 12), where a token has one weight in every minibatch of the same number of rows.
    """
    return masked_sum(values, mask) / max(tokens, 1.0)


def constant_length_mean(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, rows: int, max_completion_length: int
) -> Float[Tensor, ""]:
    """Sum over tokens divided by rows * max_completion_length.

    Liu et al., 2025, Dr. GRPO (arXiv:2503.20783): a token's weight depends neither on its row's length nor on the
    other rows'.
    """
    return masked_sum(values, mask) / (rows * max_completion_length)


def mean_of_row_sums(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], *, rows: int
) -> Float[Tensor, ""]:
    """Sum over tokens divided by `rows`. LUSPO, 2026 (arXiv:2602.05261)."""
    return masked_sum(values, mask) / rows


def reduce_tokens(
    values: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    loss: LossName,
    denominators: Denominators,
) -> Float[Tensor, ""]:
    """The reduction that belongs to a loss, with its denominator out of the minibatch's counts."""
    match loss:
        case "grpo" | "sapo" | "gspo":
            return mean_of_row_means(values, mask, rows=denominators.rows)
        case "bnpo":
            return token_mean(values, mask, tokens=float(denominators.tokens))
        case "dr_grpo":
            length = denominators.max_completion_length
            return constant_length_mean(values, mask, rows=denominators.rows, max_completion_length=length)
        case "dapo" | "cispo" | "vespo":
            return token_mean(values, mask, tokens=denominators.expected_tokens)
        case "luspo":
            return mean_of_row_sums(values, mask, rows=denominators.rows)
        case _:
            assert_never(loss)
