"""Make a loaded model trainable."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_core.policies.trained.choice import TrainingChoice
from grpo_core.policies.trained.full import FullModel
from grpo_core.policies.trained.lora import LoraModel
from grpo_core.policies.trained.model import TrainedModel


def train_model(
    base: Any,
    choice: TrainingChoice,
    *,
    base_name: str,
    default_targets: str | None = None,
    own_frozen: tuple[str, ...] = (),
    initial_state: Callable[[], dict[str, Tensor]] | None = None,
) -> TrainedModel:
    """Add adapters to a model, or unfreeze its weights.

    Args:
        base: a transformers model on its device; changed in place.
        choice: what is trained.
        base_name: folder or hub name, written into saved adapters.
        default_targets: layers that get an adapter if the choice names none.
        own_frozen: prefixes of the names of parameters that this kind of policy never trains.
        initial_state: reads the initial weights again, for full weights; None keeps a copy of them in CPU memory.

    Raises:
        InputError: adapter targets or frozen names that match nothing, or nothing that would be trained.
    """
    if choice.lora is not None:
        return LoraModel(
            base,
            choice.lora,
            base_name=base_name,
            seed=choice.seed,
            default_targets=default_targets,
            gradient_checkpointing=choice.gradient_checkpointing,
        )
    return FullModel(
        base,
        own_frozen=own_frozen,
        frozen=choice.frozen,
        reference=choice.reference,
        initial_state=initial_state,
        gradient_checkpointing=choice.gradient_checkpointing,
    )
