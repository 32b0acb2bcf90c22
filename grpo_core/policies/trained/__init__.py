"""The trained part of a model, how it is saved, and its reference: LoRA, or full weights.

choice         the settings that select what is trained
stored_adapter the settings of an adapter that training starts from
model          the interface of a trained model, its reference and its moving average, gradient checkpointing
lora_and_full  adapters, full weights, or nothing
merged         adapters added to the weights while sampling
whole          a model or pipeline with trained weights, as transformers and diffusers load it
component      the half of a policy's component that its trained model implements; 16-bit arithmetic
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.policies.trained.choice import LoraSettings, Reference, TrainingChoice
    from grpo_core.policies.trained.component import (
        TrainedComponent,
        autocast,
        refuse_unavailable_attention,
        refuse_unscaled_float16,
        use_attention,
    )
    from grpo_core.policies.trained.lora_and_full import WEIGHTS_FILE, FrozenModel, FullModel, LoraModel, train_model
    from grpo_core.policies.trained.model import TrainedModel
    from grpo_core.policies.trained.stored_adapter import ADAPTER_FILE
    from grpo_core.policies.trained.whole import FULL_WEIGHTS, TrainedPart, save_pipeline, save_whole

__all__ = [
    "ADAPTER_FILE",
    "FULL_WEIGHTS",
    "WEIGHTS_FILE",
    "FrozenModel",
    "FullModel",
    "LoraModel",
    "LoraSettings",
    "Reference",
    "TrainedComponent",
    "TrainedModel",
    "TrainedPart",
    "TrainingChoice",
    "autocast",
    "refuse_unavailable_attention",
    "refuse_unscaled_float16",
    "save_pipeline",
    "save_whole",
    "train_model",
    "use_attention",
]

__getattr__ = import_on_use(__name__, __file__)
