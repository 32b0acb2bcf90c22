"""Training of adapters over a frozen base."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.choice import LoraSettings
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.weights import differing_shapes, on_cpu

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_FILE = "adapter_model.safetensors"


def _no_model_card(output_dir: str) -> None:
    """Replace peft's function, which writes a model card."""


class LoraModel(TrainedModel):
    """Adapters over a frozen base.

    The reference is the base with the adapters off; once refreshed, it is the base with earlier values of the
    adapters, which are kept on the same device.
    """

    model: "PeftModel"

    def __init__(
        self,
        base: nn.Module,
        settings: LoraSettings,
        *,
        base_name: str,
        seed: int,
        default_targets: str | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Add adapters whose initial values change nothing.

        Args:
            base: its parameters are frozen.
            settings: rank, scale and targets.
            base_name: name of the base in the saved adapter, for peft to find it again.
            seed: for the random half of the adapters.
            default_targets: regular expression, or peft's `all-linear`, if the settings name no targets.
            gradient_checkpointing: recompute activations in the backward pass.

        Raises:
            InputError: the targets match no layer.
        """
        targets = default_targets if settings.targets is None else settings.targets
        if targets is None:
            raise ValueError("neither the settings nor default_targets say which layers get an adapter")
        adapted = _with_adapters(base, settings, targets, seed)
        adapted.peft_config["default"].base_model_name_or_path = base_name
        # The model card says nothing about this policy, and its template is compiled at every save.
        adapted.create_or_update_model_card = _no_model_card
        super().__init__(adapted, gradient_checkpointing=gradient_checkpointing)
        self._initial = {name: on_cpu(value) for name, value in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        state: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return state

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)

    def load(self, folder: Path | None) -> None:
        """Load the adapters of `folder`; None restores the initial ones."""
        from peft import set_peft_model_state_dict

        state = self._initial if folder is None else load_file(folder / ADAPTER_FILE)
        # Compared first: peft would load only the matching part, and the policy would mix two versions.
        differing = differing_shapes(state, self._initial)
        if differing:
            hint = "The stored adapter is for another model, rank or targets; set policy as it was for that adapter."
            raise InputError("policy.lora", differing[:3], hint)
        set_peft_model_state_dict(self.model, state)

    @property
    def has_reference(self) -> bool:
        """Always True: the base is the reference."""
        return True

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Give the base with the adapters off; once refreshed, the base with the reference's adapters."""
        if self._reference is None:
            with self.model.disable_adapter():
                yield self.model
        else:
            with self._as_reference(self._reference) as model:
                yield model

    def load_reference(self, folder: Path | None) -> None:
        """Load the adapters of `folder` for the reference; None: the base without adapters."""
        if folder is None:
            self._reference = None
        else:
            super().load_reference(folder)

    def _reference_device(self) -> torch.device | None:
        return None


def _with_adapters(base: nn.Module, settings: LoraSettings, targets: str, seed: int) -> "PeftModel":
    # Importing peft takes seconds, and most of what imports this package builds no adapters.
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft reads an attribute of transformers by its previous name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        torch.manual_seed(seed)
        try:
            return get_peft_model(base, config)
        except (ValueError, re.error) as error:
            hint = f"Give a regular expression over the model's layer names ({error})."
            raise InputError("policy.lora.targets", targets, hint) from error
