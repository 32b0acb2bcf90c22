"""Group-relative advantages: each sample is compared with its siblings, not with the batch.

settings    every option, and which settings fit which mix of rewards
objective   each reward normalised as its term says, and summed: the number that siblings are compared by
compared    which samples of a prompt are compared to train each stream, and by which rewards
compute     rewards of siblings -> one advantage per sample; the KL to the reference; the numbers of a reward curve
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.advantages.compared import ComparedSamples, compared_samples
    from grpo_core.advantages.compute import GroupAdvantages, compute_advantages, kl_penalty, reward_metrics
    from grpo_core.advantages.settings import AdvantageSettings, refuse_terms

__all__ = [
    "AdvantageSettings",
    "ComparedSamples",
    "GroupAdvantages",
    "compared_samples",
    "compute_advantages",
    "kl_penalty",
    "refuse_terms",
    "reward_metrics",
]

__getattr__ = import_on_use(__name__, __file__)
