"""Group-relative advantages: a sample is judged against its siblings, not against the batch.

settings      baseline, scale, aggregation, clip, missing rewards, groups without spread, KL in the reward; what of it
              goes with which mix of rewards
kl_penalty    what a row pays for its distance from the reference
moments       mean and standard deviation of rows with gaps
objective     each reward on the scale that its term asks for, added up: what siblings are compared by
compute       rewards of siblings -> one advantage a sample
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
