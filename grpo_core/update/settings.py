"""How stored rollouts become optimizer steps."""

from dataclasses import dataclass, field

from grpo_core.losses import LossSettings
from grpo_core.parity import ParityTolerance


@dataclass(frozen=True)
class UpdateSettings:
    """Sizes, loss and limits of one update.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows per optimizer step; None takes all rows.
        micro_batch_size: rows per forward and backward pass; changes memory, not the gradient.
        loss: which loss, its clipping, KL, entropy bonus and corrections.
        entropy_quantile: share of a minibatch's tokens, those of highest entropy, that train the policy, in (0, 1];
            1 is all (Wang et al., 2025, "Beyond the 80/20 rule", arXiv:2506.01939).
        mask_truncated: rows that were truncated at their maximum length stay out of the loss (DAPO, arXiv:2503.14476,
            section 3.4, overlong filtering); they stay in the statistics of their group.
        max_grad_norm: gradients are scaled to this norm.
        parity: allowed difference of stored and recomputed log-probs.
    """

    epochs: int = 1
    minibatch_size: int | None = None
    micro_batch_size: int = 8
    loss: LossSettings = field(default_factory=LossSettings)
    entropy_quantile: float = 1.0
    mask_truncated: bool = False
    max_grad_norm: float = 1.0
    parity: ParityTolerance = field(default_factory=ParityTolerance)

    @property
    def with_reference(self) -> bool:
        """Whether the reference's log-probs are needed."""
        return self.loss.kl_coef > 0
