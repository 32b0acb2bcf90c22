"""How rows become optimizer steps: the options, the minibatches, and the microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from grpo_core.losses.settings import LossSettings


@dataclass(frozen=True)
class UpdateSettings(LossSettings):
    """Sizes and limits of one update, added to the options of its loss.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows per optimizer step; None: all of them.
        micro_batch_size: rows per forward and backward pass; changes memory, not the gradient.
        entropy_quantile: share of a minibatch's tokens, those of highest entropy, that train the policy; 1 is all
            (Wang et al., 2025, "Beyond the 80/20 rule", arXiv:2506.01939).
        mask_truncated: rows that were truncated at their maximum length stay out of the loss (DAPO, arXiv:2503.14476,
            section 3.4, overlong filtering); they stay in the statistics of their group.
        max_grad_norm: gradients are scaled to this norm.
        ema: decay of an exponential moving average of the trained parameters, after every optimizer step
            average = ema * average + (1 - ema) * parameter; None keeps none.

    Raises:
        InputError: as LossSettings.
    """

    epochs: PositiveInt = 1
    minibatch_size: PositiveInt | None = None
    micro_batch_size: PositiveInt = 8
    entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    mask_truncated: bool = False
    max_grad_norm: PositiveFloat = 1.0
    ema: Annotated[float | None, Field(gt=0, lt=1)] = None

    @property
    def with_reference(self) -> bool:
        """Whether the reference is needed."""
        return self.kl_coef > 0

    @property
    def with_reference_logprobs(self) -> bool:
        """Whether the reference's log-probs are needed before the first step; the exact KL is computed in each pass."""
        return self.with_reference and self.kl_estimator != "exact"


def minibatches(rows: int, minibatch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the row indices of each minibatch; every epoch has each row once, in a new order."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield order[start : start + minibatch_size]


def microbatches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Group positions of similar length into microbatches, so that little of a pass is padding."""
    # Stable: rows of one length keep their order in the minibatch.
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + size] for start in range(0, len(order), size)]
