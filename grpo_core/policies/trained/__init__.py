"""The trained part of a model, how it is saved, and its reference: LoRA, or full weights.

- `choice`: the settings that select what is trained.
- `model`: the interface of a trained model; `lora` and `full` are the two kinds, `factory` picks one.
- `policy`: the half of a policy that its trained model implements.
- `reference`: swapping the reference's values in and out, and their moving average.
- `recompute`: gradient checkpointing without dropout.
- `precision`: 16-bit arithmetic over the weights.
"""

from grpo_core.policies.trained.choice import LoraSettings, Reference, TrainingChoice
from grpo_core.policies.trained.factory import train_model
from grpo_core.policies.trained.full import WEIGHTS_FILE, FullModel
from grpo_core.policies.trained.lora import ADAPTER_FILE, LoraModel
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.policy import TrainedPolicy
from grpo_core.policies.trained.precision import autocast, refuse_unscaled_float16

__all__ = [
    "ADAPTER_FILE",
    "WEIGHTS_FILE",
    "FullModel",
    "LoraModel",
    "LoraSettings",
    "Reference",
    "TrainedModel",
    "TrainedPolicy",
    "TrainingChoice",
    "autocast",
    "refuse_unscaled_float16",
    "train_model",
]
