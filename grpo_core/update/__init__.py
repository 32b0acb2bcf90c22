"""One policy update over stored rollouts: iteration > epoch > minibatch (one optimizer step) > microbatch.

settings        how rows become optimizer steps
batches         which rows make a minibatch, and which of them a microbatch
recompute       log-probs of stored tokens under the policy before the update and under the reference
step            one optimizer step over a minibatch
metrics         the measurements of the steps, under TRL's names
process_group   the processes that share one update
accelerated     a process group over accelerate, the full model in each process
sharded         the same with a share of the model in each (FSDP2)
policy_update   the update itself
"""

from grpo_core.update.batches import minibatches
from grpo_core.update.metrics import StepMetrics, UpdateResult
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
from grpo_core.update.settings import UpdateSettings

__all__ = [
    "SINGLE_PROCESS",
    "ProcessGroup",
    "StepMetrics",
    "UpdateResult",
    "UpdateSettings",
    "minibatches",
    "update_policy",
]
