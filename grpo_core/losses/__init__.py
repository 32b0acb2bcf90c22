"""The terms of the loss, each a small pure function.

settings          every option, and what each loss accepts
policy_loss       every loss: policy term (clipped, cispo, sapo, vespo), reduction; the user's own loss
ratios            importance ratio of a token, or of its sequence (GSPO); weights for a sampler that is not the policy
kl                k1, k2, k3 to the reference, times the importance ratio if requested
reductions        the tokens that count, and from one value per token to one number, each with its denominator
nft               DiffusionNFT, a regression without ratios
microbatch_loss   all of these composed into the loss of a microbatch, and its clip counts
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.losses.kl import estimate_kl
    from grpo_core.losses.microbatch_loss import (
        ClipCounts,
        LossInputs,
        TokenLoss,
        clipped_share_of_rows,
        compute_microbatch_loss,
        count_clipped,
    )
    from grpo_core.losses.nft import NftTerms, NoisedImages, nft_terms
    from grpo_core.losses.policy_loss import LOSSES, Loss, PolicyTerm, TermInputs
    from grpo_core.losses.ratios import (
        importance_ratio,
        mismatch_metrics,
        mismatch_weights,
        token_log_ratio,
    )
    from grpo_core.losses.reductions import (
        Denominators,
        entropy_threshold,
        high_entropy_mask,
        on_policy_rows,
        overlong_mask,
    )
    from grpo_core.losses.settings import (
        LOSS_TRAITS,
        ImportanceLevel,
        KlEstimator,
        LossSettings,
        LossTraits,
        MismatchMode,
        MismatchSettings,
        custom_loss_digest,
    )

__all__ = [
    "LOSSES",
    "LOSS_TRAITS",
    "ClipCounts",
    "Denominators",
    "ImportanceLevel",
    "KlEstimator",
    "Loss",
    "LossInputs",
    "LossSettings",
    "LossTraits",
    "MismatchMode",
    "MismatchSettings",
    "NftTerms",
    "NoisedImages",
    "PolicyTerm",
    "TermInputs",
    "TokenLoss",
    "clipped_share_of_rows",
    "compute_microbatch_loss",
    "count_clipped",
    "custom_loss_digest",
    "entropy_threshold",
    "estimate_kl",
    "high_entropy_mask",
    "importance_ratio",
    "mismatch_metrics",
    "mismatch_weights",
    "nft_terms",
    "on_policy_rows",
    "overlong_mask",
    "token_log_ratio",
]

__getattr__ = import_on_use(__name__, __file__)
