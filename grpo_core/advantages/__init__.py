"""Group-relative advantages: each sample is compared with its siblings, not with the batch.

settings    every option, and which settings fit which mix of rewards
objective   each reward normalised as its term says, and summed: the number that siblings are compared by
compared    which samples of a prompt are compared to train each stream, and by which rewards
compute     rewards of siblings -> one advantage per sample; the KL to the reference; the numbers of a reward curve
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.advantages.compared import compared_samples as compared_samples
    from grpo_core.advantages.compute import GroupAdvantages as GroupAdvantages
    from grpo_core.advantages.compute import compute_advantages as compute_advantages
    from grpo_core.advantages.compute import kl_penalty as kl_penalty
    from grpo_core.advantages.compute import reward_metrics as reward_metrics
    from grpo_core.advantages.settings import AdvantageSettings as AdvantageSettings
    from grpo_core.advantages.settings import refuse_terms as refuse_terms

__getattr__ = import_on_use(__name__, __file__)
