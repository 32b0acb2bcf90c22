"""What of a model is trained, how it is saved, and how its reference is had: LoRA, or full weights."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo_core.errors import InputError

ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        rank: r of the decomposition.
        alpha: the update is scaled by alpha / rank.
        targets: regular expression over the full names of the linear layers that get an adapter.
    """

    rank: int
    alpha: float
    targets: str


class TrainedModel(Protocol):
    """A model with the part of it that an update changes."""

    model: nn.Module

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What an update changes, by name."""

    @property
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""

    def reference(self) -> Any:
        """Context manager that gives the frozen reference model."""

    def save(self, folder: Path) -> None:
        """Write the trained part."""

    def load(self, folder: Path | None) -> None:
        """Take the trained part from `folder`; None goes back to the start."""


def _differing_shapes(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names that one side lacks or has in another shape."""
    return sorted(
        name
        for name in stored.keys() | expected.keys()
        if name not in stored or name not in expected or stored[name].shape != expected[name].shape
    )


class LoraModel:
    """Adapters over a frozen base; with the adapters off, the base is the reference."""

    has_reference = True

    def __init__(self, base: nn.Module, settings: LoraSettings, *, base_name: str, seed: int) -> None:
        """Add adapters that change nothing yet.

        Args:
            base: its parameters are frozen.
            settings: rank, scale and targets.
            base_name: how the base is called in the saved adapter, for peft to find it again.
            seed: of the adapters' random half.

        Raises:
            InputError: the targets match no layer.
        """
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=settings.targets,
            lora_dropout=0.0,
            bias="none",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft asks transformers for an attribute by its former name.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            torch.manual_seed(seed)
            try:
                self.model: PeftModel = get_peft_model(base, config)
            except ValueError as error:
                mend = f"Give a regular expression over the model's layer names ({error})."
                raise InputError("policy.lora.targets", settings.targets, mend) from error
        self.model.peft_config["default"].base_model_name_or_path = base_name
        self._initial = {name: _on_cpu(value) for name, value in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return state

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' matrices."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The base, adapters off."""
        with self.model.disable_adapter():
            yield self.model

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        # peft adds a model card from a template; it says nothing about this policy.
        (folder / "README.md").unlink(missing_ok=True)

    def load(self, folder: Path | None) -> None:
        """Take the adapters of `folder`, or the initial ones."""
        state = self._initial if folder is None else load_file(folder / ADAPTER_FILE)
        # Compared first: peft would take what fits, and the policy would be a mixture of two.
        differing = _differing_shapes(state, self._initial)
        if differing:
            mend = "The stored adapter is for another model, rank or targets; set policy as it was for that adapter."
            raise InputError("policy.lora", differing[:3], mend)
        set_peft_model_state_dict(self.model, state)


def _on_cpu(value: Tensor) -> Tensor:
    """A copy that takes no accelerator memory; a tensor without values has none to copy."""
    return value if value.is_meta else value.detach().to("cpu", copy=True)


class FullModel:
    """Every weight outside the frozen parts is trained; the reference is a frozen copy, if one is kept."""

    def __init__(
        self,
        model: nn.Module,
        *,
        frozen: Callable[[str], bool],
        initial_state: Callable[[], dict[str, Tensor]],
        keep_reference: bool,
    ) -> None:
        """Train the model as a whole.

        Args:
            model: changed in place.
            frozen: whether the parameter of this name is left alone.
            initial_state: reads the starting weights again.
            keep_reference: keep a frozen copy for the KL; costs the model's memory once more.
        """
        self.model = model
        self._initial_state = initial_state
        self._reference = copy.deepcopy(model).requires_grad_(False).eval() if keep_reference else None
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen(name))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that are not frozen."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @property
    def has_reference(self) -> bool:
        """Whether a copy was kept."""
        return self._reference is not None

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The frozen copy."""
        if self._reference is None:
            raise ValueError("no reference was kept; build the policy with keep_reference=True when kl_coef > 0")
        yield self._reference

    def save(self, folder: Path) -> None:
        """Write model.safetensors (or its shards) and config.json."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def load(self, folder: Path | None) -> None:
        """Take the weights of `folder`, or the starting ones."""
        if folder is None:
            state = self._initial_state()
        else:
            state = {}
            for shard in sorted(folder.glob("model*.safetensors")):
                state.update(load_file(shard))
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        differing = [name for name in _differing_shapes(state, self.model.state_dict()) if name not in tied]
        if differing:
            raise InputError("policy", differing[:3], "The stored weights are for another model.")
        self.model.load_state_dict(state, strict=False)
