"""The optimizer of a policy, its learning-rate schedule, and its state as tensors, without pickle.

- `settings`: which optimizer, which schedule.
- `schedule`: the learning rate as a function of the step.
- `kinds`: AdamW of torch, and with 8-bit and paged states of bitsandbytes.
- `state`: the optimizer's state as tensors, and back.
- `policy_optimizer`: the optimizer that an update uses.
"""

from grpo_core.optimizer.kinds import OptimizerKind, refuse_unavailable
from grpo_core.optimizer.policy_optimizer import PolicyOptimizer
from grpo_core.optimizer.schedule import LearningRateSchedule, Schedule
from grpo_core.optimizer.settings import OptimizerSettings

__all__ = [
    "LearningRateSchedule",
    "OptimizerKind",
    "OptimizerSettings",
    "PolicyOptimizer",
    "Schedule",
    "refuse_unavailable",
]
