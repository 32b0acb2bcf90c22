"""The tokens that count in a loss, and how their values become one number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def entropy_threshold(entropies: Float[Tensor, " tokens"], share: float) -> float:
    """Return the entropy, in nats, that `share` of the trained tokens reach: their (1 - share) quantile, interpolated.

    Wang et al., 2025, "Beyond the 80/20 rule" (arXiv:2506.01939). ValueError for a share outside (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share is {share}; it is the part of the tokens to keep, in (0, 1]")
    if not entropies.numel():
        return 0.0
    return float(torch.quantile(entropies.detach(), 1.0 - share))


def high_entropy_mask(
    entropy: Float[Tensor, "*actions"], loss_mask: Bool[Tensor, "*actions"], *, threshold: float
) -> Bool[Tensor, "*actions"]:
    """Return the trained tokens whose entropy is at least the threshold of :func:`entropy_threshold`."""
    return loss_mask & (entropy.detach() >= threshold)


def on_policy_rows(
    logprobs: Float[Tensor, "batch time"],
    sampling_logprobs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    threshold: float,
) -> Bool[Tensor, " batch"]:
    """Return False for rows with A < 0 whose mean (sampling - current) log-prob exceeds the threshold, nats per token.

    DeepSeek-V3.2 (arXiv:2512.02556), equation 9, off-policy sequence masking: a bad sample that the policy would
    rarely sample again teaches little and destabilises.
    """
    difference = torch.where(loss_mask, sampling_logprobs - logprobs, 0.0).detach()
    drift = difference.sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return ~((advantages < 0) & (drift > threshold))


@dataclass(frozen=True)
class Denominators:
    """Counts over all microbatches and all processes; those that average gradients multiply the loss by their number.

    Attributes:
        rows: of the minibatch, rows without trained tokens included.
        tokens: trained tokens of the minibatch.
        entropy_tokens: those of them that the entropy bonus is taken over: all, or the entropy mask's.
        rollout_rows: of all minibatches of an epoch together; rollout_tokens: their trained tokens.
        max_completion_length: maximum number of tokens in a row; of images, that of one of the sampler's own size.
    """

    rows: int
    tokens: int
    entropy_tokens: int
    rollout_rows: int
    rollout_tokens: int
    max_completion_length: int

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.rollout_rows, "a minibatch has rows, and all of them are rows of the rollout set"
        assert 0 <= self.entropy_tokens <= self.tokens <= self.rollout_tokens, "a minibatch is part of the rollout set"
        assert self.max_completion_length >= 1, "a row can have a token"

    @classmethod
    def of(
        cls, loss_mask: Bool[Tensor, "batch time"], entropy_mask: Bool[Tensor, "batch time"] | None = None
    ) -> "Denominators":
        """Count a batch that is a whole minibatch, and the only one of its rollout set; `entropy_mask` None: all."""
        (rows, time), tokens = loss_mask.shape, int(loss_mask.sum())
        entropy_tokens = tokens if entropy_mask is None else int((loss_mask & entropy_mask).sum())
        return cls(rows, tokens, entropy_tokens, rows, tokens, max_completion_length=time)

    @property
    def expected_tokens(self) -> float:
        """Average number of tokens in a minibatch of this many rows of the rollout set."""
        return self.rollout_tokens * self.rows / self.rollout_rows


Reduction = Callable[[Tensor, Tensor, Denominators], Tensor]
"""Takes values [batch, time], a mask of the same shape and the counts; returns a scalar."""


def masked_sum(values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, ""]:
    """Sum the values where the mask is True."""
    return torch.where(mask, values, 0.0).sum()


def mean_of_row_means(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], counts: Denominators
) -> Float[Tensor, ""]:
    """Sum the rows' means over their masked tokens and divide by the minibatch's rows; an empty row counts as zero.

    GRPO (arXiv:2402.03300), equation 3.
    """
    lengths = mask.sum(-1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(-1) / lengths).sum() / counts.rows


def mean_of_tokens(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], counts: Denominators
) -> Float[Tensor, ""]:
    """Divide the sum over tokens by the minibatch's trained tokens: a long row counts for more than a short one."""
    return masked_sum(values, mask) / max(float(counts.tokens), 1.0)


def mean_of_expected_tokens(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], counts: Denominators
) -> Float[Tensor, ""]:
    """Divide the sum over tokens by the minibatch's expected share of the rollout set's tokens.

    DAPO (arXiv:2503.14476), equation 12: a token has one weight in every minibatch of the same number of rows.
    """
    return masked_sum(values, mask) / max(counts.expected_tokens, 1.0)


def constant_length_mean(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], counts: Denominators
) -> Float[Tensor, ""]:
    """Divide the sum over tokens by the minibatch's rows times max_completion_length.

    Liu et al., 2025, Dr. GRPO (arXiv:2503.20783): a token's weight depends neither on its row's length nor on the
    other rows'.
    """
    return masked_sum(values, mask) / (counts.rows * counts.max_completion_length)


def mean_of_row_sums(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], counts: Denominators
) -> Float[Tensor, ""]:
    """Divide the sum over tokens by the minibatch's rows. LUSPO, 2026 (arXiv:2602.05261)."""
    return masked_sum(values, mask) / counts.rows


REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "mean_of_row_means": mean_of_row_means,
        "mean_of_tokens": mean_of_tokens,
        "mean_of_expected_tokens": mean_of_expected_tokens,
        "constant_length_mean": constant_length_mean,
        "mean_of_row_sums": mean_of_row_sums,
    }
)
"""By the name in `LossTraits.reduction`."""
