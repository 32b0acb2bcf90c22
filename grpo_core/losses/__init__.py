"""The whole algebra of the loss, each piece one small pure function.

ratios        importance ratio of a token, or of its sequence (GSPO)
surrogates    the policy term of a token: clipped, with delta; cispo; sapo; vespo; where the bounds are active
kl            k1, k2, k3 to the reference, times the importance ratio on request
masks         overlong rows, tokens of low entropy, rows that the policy has left behind
mismatch      weights for a sampler that is not the policy: truncated or masked
reductions    from a value a token to one number, each with its denominator
settings      every switch, and the combinations that are refused
policy_loss   all of these composed into the loss of a microbatch
clip_counts   clipped tokens and rows, for metrics
"""

from grpo_core.losses.clip_counts import ClipCounts, clipped_share_of_rows, count_clipped
from grpo_core.losses.kl import KlEstimator, estimate_kl, k1_kl, k2_kl, k3_kl
from grpo_core.losses.masks import entropy_threshold, high_entropy_mask, on_policy_rows, overlong_mask
from grpo_core.losses.mismatch import MismatchMode, MismatchSettings, MismatchWeights, mismatch_weights
from grpo_core.losses.policy_loss import LossInputs, TokenLoss, compute_policy_loss
from grpo_core.losses.ratios import ImportanceLevel, importance_ratio, token_log_ratio
from grpo_core.losses.reductions import Denominators, LossName
from grpo_core.losses.settings import LossSettings, default_importance_level

__all__ = [
    "ClipCounts",
    "Denominators",
    "ImportanceLevel",
    "KlEstimator",
    "LossInputs",
    "LossName",
    "LossSettings",
    "MismatchMode",
    "MismatchSettings",
    "MismatchWeights",
    "TokenLoss",
    "clipped_share_of_rows",
    "compute_policy_loss",
    "count_clipped",
    "default_importance_level",
    "entropy_threshold",
    "estimate_kl",
    "high_entropy_mask",
    "importance_ratio",
    "k1_kl",
    "k2_kl",
    "k3_kl",
    "mismatch_weights",
    "on_policy_rows",
    "overlong_mask",
    "token_log_ratio",
]
