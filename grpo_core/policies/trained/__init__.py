"""What of a model is trained, how it is saved, and how its reference is had: LoRA, or full weights.

- `choice`: the records that say what is trained.
- `model`: what every trained model can do; `lora` and `full` are the two kinds, `factory` picks one.
- `policy`: what every policy leaves to its trained model.
- `reference`: other values in the place of the trained ones, for as long as they are needed, and their moving average.
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
