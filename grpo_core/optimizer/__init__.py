"""The optimizer of a policy, its learning-rate schedule, and its state as tensors: no pickle.

- `settings`: which optimizer, which schedule.
- `schedule`: the learning rate of each step, from its number alone.
- `kinds`: AdamW of torch, and with 8-bit and paged states of bitsandbytes.
- `state`: what an optimizer remembers, to tensors and back.
- `policy_optimizer`: all of it together, from step to step.
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
