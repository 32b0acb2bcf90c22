"""The trained part of a model, how it is saved, and its reference: LoRA, or full weights.

choice         the settings that select what is trained
stored_adapter the settings of an adapter that training starts from
model          the interface of a trained model, copies of its parameters, gradient checkpointing
lora_and_full  adapters, full weights, or nothing
merged         adapters added to the weights while sampling
whole          a model or pipeline with trained weights, as transformers and diffusers load it
component      the half of a policy's component that its trained model implements; 16-bit arithmetic
"""

from typing import TYPE_CHECKING

from grpo_core.lazy import import_on_use

if TYPE_CHECKING:
    from grpo_core.policies.trained.choice import CopyName as CopyName
    from grpo_core.policies.trained.choice import LoraSettings as LoraSettings
    from grpo_core.policies.trained.choice import Reference as Reference
    from grpo_core.policies.trained.choice import TrainingChoice as TrainingChoice
    from grpo_core.policies.trained.component import TrainedComponent as TrainedComponent
    from grpo_core.policies.trained.component import autocast as autocast
    from grpo_core.policies.trained.component import refuse_unavailable_attention as refuse_unavailable_attention
    from grpo_core.policies.trained.component import refuse_unscaled_float16 as refuse_unscaled_float16
    from grpo_core.policies.trained.component import use_attention as use_attention
    from grpo_core.policies.trained.lora_and_full import WEIGHTS_FILE as WEIGHTS_FILE
    from grpo_core.policies.trained.lora_and_full import FrozenModel as FrozenModel
    from grpo_core.policies.trained.lora_and_full import LoraModel as LoraModel
    from grpo_core.policies.trained.lora_and_full import train_model as train_model
    from grpo_core.policies.trained.model import TrainedModel as TrainedModel
    from grpo_core.policies.trained.stored_adapter import ADAPTER_FILE as ADAPTER_FILE
    from grpo_core.policies.trained.whole import TrainedPart as TrainedPart
    from grpo_core.policies.trained.whole import save_pipeline as save_pipeline
    from grpo_core.policies.trained.whole import save_whole as save_whole

__getattr__ = import_on_use(__name__, __file__)
