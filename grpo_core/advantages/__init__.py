"""Group-relative advantages: each sample is compared with its siblings, not with the batch.

settings      baseline, scale, aggregation, clip, missing rewards, groups without spread, KL in the reward; which
              settings fit which mix of rewards
kl_penalty    the KL of each row to the reference
moments       mean and standard deviation of rows with gaps
objective     each reward normalised as its term says, and summed: the number that siblings are compared by
compute       rewards of siblings -> one advantage per sample
metrics       the numbers of a reward curve
"""

from grpo_core.advantages.compute import GroupAdvantages, compute_advantages
from grpo_core.advantages.kl_penalty import kl_penalty
from grpo_core.advantages.metrics import reward_metrics
from grpo_core.advantages.settings import AdvantageSettings, refuse_terms

__all__ = [
    "AdvantageSettings",
    "GroupAdvantages",
    "compute_advantages",
    "kl_penalty",
    "refuse_terms",
    "reward_metrics",
]
