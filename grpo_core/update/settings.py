"""How rows become optimizer steps: the options, the minibatches, and the microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from grpo_core.losses.settings import LossSettings
from grpo_core.settings import check_fields


@dataclass(frozen=True)
class StepSettings:
    """Sizes and limits of the optimizer steps of one update, whatever its loss.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows per optimizer step; None: all of them.
        micro_batch_size: rows per forward and backward pass; changes memory, not the gradient.
        max_grad_norm: gradients are scaled to this norm.
        ema: decay of an exponential moving average of the trained parameters, after every optimizer step
            average = ema * average + (1 - ema) * parameter; None keeps none.
    """

    epochs: PositiveInt = 1
    minibatch_size: PositiveInt | None = None
    micro_batch_size: PositiveInt = 8
    max_grad_norm: PositiveFloat = 1.0
    ema: Annotated[float | None, Field(gt=0, lt=1)] = None

    def old_policy_decay(self, update: int) -> float:
        """Return the share of the policy that sampled in the one that samples after an update.

        Args:
            update: its number, from 1.

        Returns:
            0 if the trained policy itself samples.
        """
        return 0.0


@dataclass(frozen=True)
class UpdateSettings(LossSettings, StepSettings):
    """Options of one update by a policy loss, added to those of the loss and of the optimizer steps.

    Attributes:
        entropy_quantile: share of a minibatch's tokens, those of highest entropy, that train the policy; 1 is all
            (Wang et al., 2025, "Beyond the 80/20 rule", arXiv:2506.01939).
        mask_truncated: rows that were truncated at their maximum length stay out of the loss (DAPO, arXiv:2503.14476,
            section 3.4, overlong filtering); they stay in the statistics of their group.

    Raises:
        InputError: as LossSettings.
    """

    entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    mask_truncated: bool = False

    @property
    def with_reference(self) -> bool:
        """Whether the reference is needed."""
        return self.kl_coef > 0

    @property
    def with_reference_logprobs(self) -> bool:
        """Whether the reference's log-probs are needed before the first step; the exact KL is computed in each pass."""
        return self.with_reference and self.kl_estimator != "exact"


@dataclass(frozen=True)
class NftSettings(StepSettings):
    """Options of one update by DiffusionNFT (Zheng et al., 2025, arXiv:2509.16117).

    Attributes:
        nft_beta: distance of the two implicit policies from the old policy: their velocities are
            old +- nft_beta (policy - old). A smaller one moves the policy further.
        advantage_clip: advantages are clipped here; one of -advantage_clip makes an image wholly negative, one of
            advantage_clip wholly positive.
        timesteps_per_image: noise levels that each image is trained at in an epoch, out of those that it was denoised
            over; None: all of them, as in the paper's code.
        old_decay: largest decay of the old policy, which samples. After update i it becomes decay * old + (1 - decay) *
            policy, with decay = min(old_decay_step * i, old_decay), as in the paper's code; 0: it is the policy before
            the update.
        old_decay_step: growth of the decay with each update.
        kl_coef: weight of the squared distance of the velocity from the reference's; 1e-4 in the paper.

    Raises:
        InputError: a number is out of its range.
    """

    nft_beta: PositiveFloat = 1.0
    advantage_clip: PositiveFloat = 5.0
    timesteps_per_image: PositiveInt | None = None
    old_decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    old_decay_step: PositiveFloat = 0.001
    kl_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "update")

    @property
    def with_reference(self) -> bool:
        """Whether the reference is needed."""
        return self.kl_coef > 0

    def old_policy_decay(self, update: int) -> float:
        """Return min(old_decay_step * update, old_decay)."""
        return min(self.old_decay_step * update, self.old_decay)


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
