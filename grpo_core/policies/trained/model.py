"""The interface of a trained model, copies of its parameters such as its reference, and gradient checkpointing."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_core.errors import InputError
from grpo_core.policies.trained.settings import CopyName, TrainingChoice

CPU = torch.device("cpu")
BATCHES_PER_EXCHANGE = 32
"""Microbatches for which other weights are exchanged once: what these give is kept, far less than one's activations."""

_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


class WeightCopy:
    """Other values of the parameters that a model trains, by name, on any device; changed in place."""

    def __init__(self, trained: "TrainedModel", values: dict[str, Tensor]) -> None:
        self._trained, self.values = trained, values

    def mix(self, share: float) -> None:
        """Make the values share * policy + (1 - share) * values, parameter by parameter, in fp32; 0 < share <= 1.

        With adapters the matrices are mixed, not their products that are added to the weights; the initial reference of
        adapters has their initial matrices, which add nothing. InputError for values in 16 bits and a share below 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the share is {share}; it has to be above 0 and at most 1")
        if share < 1:
            _refuse_average_in_16_bits(self.values)
        with torch.no_grad():
            for name, parameter in self._trained.trainable_parameters().items():
                value = self.values[name]
                current = parameter.detach().to(value.device, torch.float32)
                # 0 times infinity is NaN.
                value.copy_(current if share == 1 else share * current + (1 - share) * value.float())

    def save(self, folder: Path) -> None:
        """Write the values as `TrainedModel.save` writes the policy."""
        with self.use():
            self._trained.save(folder)

    @contextmanager
    def use(self) -> Iterator[nn.Module]:
        """Give the model with these values in place of the policy's, for forward passes without gradients."""
        with torch.no_grad(), exchanged(self._trained.trainable_parameters(), self.values):
            yield self._trained.model

    def change(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Keep the values in another form, such as a process's share; `change` gets each with its name."""
        self.values = {name: change(name, value) for name, value in self.values.items()}


class TrainedModel(ABC):
    """A model with its trained part, and the copies of its parameters, as of the reference of its KL."""

    model: nn.Module
    copies: dict[CopyName, WeightCopy]
    # Whether a pass computes the prompt of several rows once; a trial of the loaded model finds out.
    shares_prompts: bool = False
    # Where the reference is kept; None: on the device of each parameter.
    _reference_device: torch.device | None = None

    def __init__(self, model: nn.Module, choice: TrainingChoice) -> None:
        """Wrap a model whose parameters are frozen or trainable; InputError if no layer can recompute activations."""
        self.model, self.copies = model, {}
        self._gradient_checkpointing = choice.gradient_checkpointing
        if choice.gradient_checkpointing:
            enable_recomputation(model)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name, in a fixed order; tied weights once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def undecayed_parameters(self) -> frozenset[str]:
        """Return the names of the parameters without weight decay, by the rule of transformers' Trainer."""

        def left_alone(name: str) -> bool:
            owner = self.model.get_submodule(name.rpartition(".")[0])
            return isinstance(owner, nn.LayerNorm) or _NORM_OR_BIAS.search(name.lower()) is not None

        return frozenset(filter(left_alone, self.trainable_parameters()))

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients; dropout stays off, or the ratio would differ from one on unchanged weights."""
        self.model.eval()
        recompute_layers(self.model, self._gradient_checkpointing)

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling, without dropout and recomputation."""
        self.model.eval()

    def merged(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes the same with fewer operations, without gradients."""
        return nullcontext()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained part."""

    @abstractmethod
    def load(self, folder: Path | None) -> None:
        """Load the trained part from `folder`; None restores the initial one. InputError changes nothing."""

    @property
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""
        return "reference" in self.copies

    def reference(self) -> AbstractContextManager[nn.Module]:
        """Return a context that gives the reference for passes without gradients; ValueError if there is none.

        Inside it the policy's weights may be swapped out.
        """
        self._require_reference()
        return self.copies["reference"].use()

    def reference_copy(self) -> WeightCopy:
        """Return the reference's values, to be mixed or saved; ValueError if there is no reference."""
        self._require_reference()
        if "reference" not in self.copies:
            self.copies["reference"] = self._stored(None, self._reference_device)
        return self.copies["reference"]

    def load_reference(self, folder: Path | None) -> None:
        """Load the reference of `folder`; None restores the initial one. ValueError and InputError as above."""
        self._require_reference()
        self.copies["reference"] = self._stored(folder, self._reference_device)

    def keep(self, name: CopyName, folder: Path | None = None) -> None:
        """Keep a copy of the trained parameters under this name, as WeightCopy.save wrote it; None: the current ones.

        InputError if the weights are another model's, or a moving average would have 16 bits.
        """
        if name == "ema":
            _refuse_average_in_16_bits(self.trainable_parameters())
        self.copies[name] = self._current(None) if folder is None else self._stored(folder, None)

    def _current(self, device: torch.device | None) -> WeightCopy:
        return WeightCopy(self, copied(self.trainable_parameters(), device))

    def _stored(self, folder: Path | None, device: torch.device | None) -> WeightCopy:
        copy = self._current(device)
        with copy.use():
            self.load(folder)
        return copy

    def _require_reference(self) -> None:
        if not self.has_reference:
            raise ValueError("no reference is kept; train_model keeps one with reference='device' or 'cpu'")


def _refuse_average_in_16_bits(values: Mapping[str, Tensor]) -> None:
    """Refuse an average that would stand still: what a step adds is less than half of what 16 bits tell apart."""
    for name, value in values.items():
        if value.is_floating_point() and value.dtype.itemsize < 4:
            hint = (
                f"Averages of full weights in 16 bits are not kept, because small steps vanish in them ({name}); load "
                "the weights in float32, with autocast for arithmetic in bfloat16, or train adapters."
            )
            raise InputError("policy.dtype", str(value.dtype).removeprefix("torch."), hint)


def copied(parameters: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Copy the values, to the same or another device; meta tensors are returned unchanged."""
    return {
        name: value.detach() if value.is_meta else value.detach().to(device or value.device, copy=True)
        for name, value in parameters.items()
    }


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Swap the parameters with values of the same shapes and dtypes inside the context, one at a time, and back.

    A graph that was built over the parameters before cannot be run backwards afterwards; torch refuses it.
    """
    _exchange(parameters, values)
    try:
        yield
    finally:
        _exchange(parameters, values)


@torch.no_grad()
def _exchange(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        previous = parameter.detach().to(values[name].device, copy=True)
        parameter.copy_(values[name])
        values[name].copy_(previous)
    # A surrounding autocast has cached the previous values in 16 bits.
    torch.clear_autocast_cache()


def _diffusion_model(model: nn.Module) -> Any:
    # Only models of diffusers have this method, and importing diffusers takes seconds.
    return next((part for part in model.modules() if hasattr(type(part), "enable_gradient_checkpointing")), None)


def _layers(model: nn.Module) -> Iterator[Any]:
    # Importing transformers takes seconds, and most of what imports this package runs no model.
    from transformers.modeling_layers import GradientCheckpointingLayer

    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def enable_recomputation(model: nn.Module) -> None:
    """Let the layers recompute activations in the backward pass, while `recompute_layers` says so; or InputError."""
    diffusion_model = _diffusion_model(model)
    layers = [] if diffusion_model is not None else list(_layers(model))
    if diffusion_model is not None and diffusion_model._supports_gradient_checkpointing:
        # Its blocks are recomputed in any mode, but only where gradients are enabled, so sampling needs no switch.
        diffusion_model.enable_gradient_checkpointing()
    elif not layers:
        hint = f"{type(model).__name__} has no layers that recompute their activations; set it to false."
        raise InputError("policy.gradient_checkpointing", True, hint)
    for layer in layers:
        layer.gradient_checkpointing = True
        # Otherwise transformers drops the keys of a prompt; the caches of a pass with gradients survive a second one.
        layer._can_checkpoint_with_cache = True
        layer._gradient_checkpointing_func = partial(_run, layer)


def recompute_layers(model: nn.Module, recompute: bool) -> None:
    """Switch recomputation on or off: layers are checkpointed only in training mode, the modules inside are not set."""
    for layer in _layers(model):
        layer.training = recompute


def _run(layer: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer's forward pass with checkpointing; the layer is in evaluation mode, because some have dropout."""

    def evaluated(*values: Any) -> Any:
        trains, layer.training = layer.training, False
        try:
            return function(*values)
        finally:
            layer.training = trains

    # Nothing random happens inside, so no random state has to be kept.
    return checkpoint(evaluated, *inputs, use_reentrant=False, preserve_rng_state=False)


def refuse_differing(
    stored: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: str, hint: str, value: str | None = None
) -> None:
    """Raise InputError with the first names that one side lacks or has in another shape, or with this value."""
    shapes = [{(name, value.shape) for name, value in side.items()} for side in (stored, expected)]
    if differing := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
        raise InputError(place, value or differing[:3], f"{hint} ({', '.join(differing[:3])} differ.)")
