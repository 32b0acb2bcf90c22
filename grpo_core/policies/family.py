"""The kinds of policy by name: how each is loaded, and what can be known to be wrong before it is."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch

from grpo_core.policies.estimate import ModelEstimate, Workload
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained import TrainingChoice
from grpo_core.records import Modality


class PolicyFamily(Protocol):
    """One kind of policy. Building it imports none of the libraries that its models need.

    Attributes:
        medium: what its rows of tokens become.
    """

    modality: Modality

    def settings(self, values: Mapping[str, Any]) -> Any:
        """The frozen record that says how it samples, from a configuration's section or from a stored row.

        Args:
            values: by the record's field names; other keys are left alone.
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
            InputError: no such model, settings that it cannot sample with, or a choice that trains nothing.
        """

    def refuse_missing(self, model: str) -> None:
        """Raise InputError when a folder that was given is not there, or is no model of this kind."""

    def refuse_unusable(self, model: str, settings: Any) -> None:
        """Raise InputError when the model cannot sample with these settings, as far as its files at hand tell."""

    def refuse_prompts(self, model: str, settings: Any, prompts: Sequence[str]) -> None:
        """Raise InputError when the model cannot read one of the prompts; its tokenizer alone is loaded."""

    def refuse_choice(self, model: str, choice: TrainingChoice) -> None:
        """Raise InputError when the choice fits nothing of the model, which is built without values."""

    def estimate(self, model: str, settings: Any, choice: TrainingChoice, workload: Workload) -> ModelEstimate:
        """What the model needs of one GPU and of the disk; nothing is loaded.

        Raises:
            InputError: its configuration is not at hand, or the choice trains nothing.
        """


def family_module(kind: str) -> str:
    """The module of a kind of policy, by its dotted name."""
    return f"grpo_core.policies.{kind}.family"


def policy_family(kind: str) -> PolicyFamily:
    """The kind of policy of that name, which is its package's."""
    family: PolicyFamily = import_module(family_module(kind)).FAMILY
    return family
