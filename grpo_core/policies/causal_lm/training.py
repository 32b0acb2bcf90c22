"""Select the trained parameters of a causal language model."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_core.policies.trained import TrainedModel, TrainingChoice, train_model

# In peft's sense: every linear layer but the output head, whatever the architecture calls them.
ALL_LINEAR = "all-linear"


def train_causal_lm(
    base: Any,
    choice: TrainingChoice,
    *,
    base_name: str,
    initial_state: Callable[[], dict[str, Tensor]] | None = None,
) -> TrainedModel:
    """Call `train_model`; by default every linear layer but the head gets an adapter.

    Raises:
        InputError: adapter targets or frozen names that match nothing, or nothing that would be trained.
    """
    with warnings.catch_warnings():
        # peft transposes the matrices of GPT-2's layers, with a warning for each.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        return train_model(base, choice, base_name=base_name, default_targets=ALL_LINEAR, initial_state=initial_state)
