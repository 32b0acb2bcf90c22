"""One policy update over stored rollouts: iteration > epoch > minibatch (one optimizer step) > microbatch.

settings        how rows become optimizer steps, minibatches and microbatches
policy_update   the update by importance ratios: log-probs before it, the parity gate, the steps
gradient        the gradient of its minibatches, added up over microbatches
nft_update      the update by DiffusionNFT, from finished images alone
forward_process images with noise added again, for it
step            one optimizer step, and what surrounds the steps of any algorithm
metrics         the measurements of the steps, under TRL's names
process_group   the processes that share one update
accelerated     process groups over accelerate: the full model in each process, or a share of it (FSDP2)
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.update.metrics import RatioStepMetrics, StepMetrics, UpdateResult
    from grpo_core.update.nft_update import NftStepMetrics, update_by_nft
    from grpo_core.update.policy_update import update_policy
    from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
    from grpo_core.update.settings import NftSettings, StepSettings, UpdateSettings, minibatches

__all__ = [
    "SINGLE_PROCESS",
    "NftSettings",
    "NftStepMetrics",
    "ProcessGroup",
    "RatioStepMetrics",
    "StepMetrics",
    "StepSettings",
    "UpdateResult",
    "UpdateSettings",
    "minibatches",
    "update_by_nft",
    "update_policy",
]

__getattr__ = import_on_use(__name__, __file__)
