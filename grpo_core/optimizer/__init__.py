"""The optimizer of a policy, its learning-rate schedule, and its state as tensors, without pickle.

settings           which optimizer, and the learning rate as a function of the step
policy_optimizer   the optimizer that an update uses, and its state as tensors and back
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.optimizer.policy_optimizer import PolicyOptimizer, refuse_unavailable
    from grpo_core.optimizer.settings import LearningRateSchedule, OptimizerKind, OptimizerSettings, Schedule

__all__ = [
    "LearningRateSchedule",
    "OptimizerKind",
    "OptimizerSettings",
    "PolicyOptimizer",
    "Schedule",
    "refuse_unavailable",
]

__getattr__ = import_on_use(__name__, __file__)
