"""The kinds of policy by name: how each is loaded, and how it is checked before."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch

from grpo_core.policies.estimate import ModelEstimate, Workload
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained import TrainingChoice
from grpo_core.records import Modality


class PolicyFamily(Protocol):
    """One kind of policy; creating it does not import its models' libraries.

    Attributes:
        modality: what its tokens are rendered to.
    """

    modality: Modality

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Return the frozen sampling settings from a configuration section or a stored row.

        Args:
            values: by field name; other keys are ignored.
        """

    def load(
        self,
        model: str,
        settings: Any,
        choice: TrainingChoice,
        *,
        dtype: torch.dtype,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> Policy:
        """Load a model by folder or hub name.

        Raises:
            InputError: no such model, settings that it cannot sample with, or no parameter to train.
        """

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model of this kind."""

    def refuse_unusable(self, model: str, settings: Any) -> None:
        """Raise InputError if the model cannot sample with these settings, as far as its local files show."""

    def refuse_prompts(self, model: str, settings: Any, prompts: Sequence[str]) -> None:
        """Raise InputError if the model cannot read one of the prompts; only its tokenizer is loaded."""

    def refuse_choice(self, model: str, choice: TrainingChoice) -> None:
        """Raise InputError if the choice matches nothing in the model, which is built on the meta device."""

    def estimate(self, model: str, settings: Any, choice: TrainingChoice, workload: Workload) -> ModelEstimate:
        """Estimate the GPU memory and disk space that the model needs; nothing is loaded.

        Raises:
            InputError: its configuration is not on this machine, or no parameter is trained.
        """


def family_module(kind: str) -> str:
    """Return the dotted name of the module of a kind of policy."""
    return f"grpo_core.policies.{kind}.family"


def policy_family(kind: str) -> PolicyFamily:
    """Return the policy family of that name, which is the name of its package."""
    family: PolicyFamily = import_module(family_module(kind)).FAMILY
    return family
