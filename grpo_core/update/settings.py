"""How stored rollouts become optimizer steps."""

from dataclasses import dataclass

from grpo_core.losses import LossSettings
from grpo_core.parity import ParityTolerance


@dataclass(frozen=True)
class UpdateSettings:
    """Sizes, loss and limits of one update.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows an optimizer step.
        micro_batch_size: rows a forward and backward pass; changes memory, not the gradient.
        loss: which loss, its clipping, KL, entropy bonus and corrections.
        entropy_quantile: share of a minibatch's tokens, those of highest entropy, that train the policy; 1 is all
            (Wang et al., 2025, "Beyond the 80/20 rule", arXiv:2506.01939).
        mask_truncated: rows that were cut at their greatest length stay out of the loss (DAPO, arXiv:2503.14476,
            section 3.4, overlong filtering); they stay in the statistics of their group.
        max_length: tokens that a row could have, at most; the denominator of dr_grpo.
        max_grad_norm: gradients are scaled to this norm.
        parity: allowed difference of stored and recomputed log-probs.
    """

    epochs: int
    minibatch_size: int
    micro_batch_size: int
    loss: LossSettings
    entropy_quantile: float
    mask_truncated: bool
    max_length: int
    max_grad_norm: float
    parity: ParityTolerance

    @property
    def with_reference(self) -> bool:
        """Whether the reference's log-probs are needed."""
        return self.loss.kl_coef > 0
