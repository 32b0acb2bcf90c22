"""The interface of a trained model, its reference, and gradient checkpointing."""

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
from grpo_core.policies.trained.choice import TrainingChoice


class TrainedModel(ABC):
    """A model with its trained part, and the reference that its KL is measured against.

    Attributes:
        model: the module that is run.
    """

    model: nn.Module
    # The reference's values of the trained parameters; None if it needs none.
    _reference: dict[str, Tensor] | None = None
    # Their moving average, during an update that keeps one.
    _average: dict[str, Tensor] | None = None
    # Their values before an update, while it goes on.
    _old: dict[str, Tensor] | None = None
    # Where they are kept; None: on the device of each parameter.
    _reference_device: torch.device | None = None

    def __init__(self, model: nn.Module, choice: TrainingChoice) -> None:
        """Wrap a model whose parameters are already frozen or trainable.

        Raises:
            InputError: activations are to be recomputed, but the model has no layers that can.
        """
        self.model = model
        self._gradient_checkpointing = choice.gradient_checkpointing
        if choice.gradient_checkpointing:
            enable_recomputation(model)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name, in a fixed order; tied weights once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

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
        """Load the trained part from `folder`; None restores the initial one.

        Raises:
            InputError: the weights are another model's; none of them is loaded.
        """

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that gives the reference model, for forward passes without gradients.

        Inside it the policy's weights may be swapped out.

        Raises:
            ValueError: there is none.
        """

    @contextmanager
    def _with_values(self, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        with torch.no_grad(), exchanged(self.trainable_parameters(), values):
            yield self.model

    def _require_reference(self) -> None:
        if not self.has_reference:
            raise ValueError("no reference is kept; train_model keeps one with reference='device' or 'cpu'")

    def _stored_values(self, folder: Path | None, device: torch.device | None) -> dict[str, Tensor]:
        values = copied(self.trainable_parameters(), device)
        with self._with_values(values):
            self.load(folder)
        return values

    def _reference_values(self) -> dict[str, Tensor]:
        self._require_reference()
        return self._stored_values(None, self._reference_device) if self._reference is None else self._reference

    def change_copies(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Keep the values of the copies in another form, such as a process's share of them.

        Args:
            change: takes a parameter's name and a value of it, returns the value to keep instead.
        """
        for each in ("_reference", "_average", "_old"):
            values: dict[str, Tensor] | None = getattr(self, each)
            if values is not None:
                setattr(self, each, {name: change(name, value) for name, value in values.items()})

    def _current_or_stored(self, folder: Path | None) -> dict[str, Tensor]:
        return copied(self.trainable_parameters()) if folder is None else self._stored_values(folder, None)

    def begin_average(self, folder: Path | None) -> None:
        """Keep a moving average of the trained parameters from here on.

        Args:
            folder: has the average so far, as `end_average` wrote it; None: it begins with the current weights.
        """
        self._average = self._current_or_stored(folder)

    def update_average(self, mix: float) -> None:
        """Make the average mix * policy + (1 - mix) * average, parameter by parameter, in fp32.

        Args:
            mix: share of the policy, 0 < mix <= 1.
        """
        assert self._average is not None, "begin_average comes first"
        mix_into(self._average, self.trainable_parameters(), mix)

    def end_average(self, folder: Path) -> None:
        """Write the average as `save` writes the policy, and free its memory."""
        assert self._average is not None, "begin_average comes first"
        with self._with_values(self._average):
            self.save(folder)
        self._average = None

    @property
    def has_old(self) -> bool:
        """Whether `old` can be entered."""
        return self._old is not None

    def keep_old(self, folder: Path | None = None) -> None:
        """Keep earlier values of the trained parameters, until `drop_old` or `end_old`.

        Args:
            folder: has the values, as `end_old` wrote them; None: the current ones.
        """
        self._old = self._current_or_stored(folder)

    def drop_old(self) -> None:
        """Free the memory of the copy, if there is one."""
        self._old = None

    def end_old(self, folder: Path, mix: float) -> None:
        """Write mix * policy + (1 - mix) * old as `save` writes the policy, and free the memory of the copy.

        Args:
            mix: share of the policy, 0 < mix <= 1.
        """
        assert self._old is not None, "keep_old comes first"
        mix_into(self._old, self.trainable_parameters(), mix)
        with self._with_values(self._old):
            self.save(folder)
        self._old = None

    def old(self) -> AbstractContextManager[nn.Module]:
        """Return a context that gives the model as `keep_old` found it, for forward passes without gradients."""
        assert self._old is not None, "keep_old comes first"
        return self._with_values(self._old)

    def refresh_reference(self, mix: float) -> None:
        """Make the reference mix * policy + (1 - mix) * reference, parameter by parameter, in fp32.

        With adapters the matrices are mixed, not their products that are added to the weights; the initial reference of
        adapters has their initial matrices, which add nothing.

        Args:
            mix: share of the policy, 0 < mix <= 1; 1 makes the reference the policy.

        Raises:
            ValueError: there is no reference, or mix is outside its range.
        """
        values = self._reference_values()
        mix_into(values, self.trainable_parameters(), mix)
        self._reference = values

    def save_reference(self, folder: Path) -> None:
        """Write the reference as `save` writes the policy.

        Raises:
            ValueError: there is no reference.
        """
        with self._with_values(self._reference_values()):
            self.save(folder)

    def load_reference(self, folder: Path | None) -> None:
        """Load the reference of `folder`; None restores the initial one.

        Raises:
            ValueError: there is no reference to be replaced.
            InputError: the weights are another model's; the reference stays as it was.
        """
        self._require_reference()
        self._reference = self._stored_values(folder, self._reference_device)


def copied(parameters: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Copy the values, to the same or another device; meta tensors are returned unchanged."""
    return {
        name: value.detach() if value.is_meta else value.detach().to(device or value.device, copy=True)
        for name, value in parameters.items()
    }


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Swap the parameters with `values` inside the context, and back at its end.

    The only additional memory is a copy of one parameter at a time. A graph that was built over the parameters before
    cannot be run backwards afterwards; torch refuses it.

    Args:
        values: of the same names, shapes and dtypes, on any device; changed in place.
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


@torch.no_grad()
def mix_into(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], mix: float) -> None:
    """Make the values mix * parameters + (1 - mix) * values, in fp32, rounded once to the values' dtype.

    Args:
        values: changed in place, where they are.
        mix: share of the parameters, 0 < mix <= 1.

    Raises:
        ValueError: mix is outside its range.
    """
    if not 0 < mix <= 1:
        raise ValueError(f"mix is {mix}; it has to be above 0 and at most 1")
    for name, parameter in parameters.items():
        current = parameter.detach().to(values[name].device, torch.float32)
        # 0 times infinity is NaN.
        mixed = current if mix == 1 else mix * current + (1 - mix) * values[name].float()
        values[name].copy_(mixed)


def _diffusion_model(model: nn.Module) -> Any:
    """Return the model of diffusers that this is or wraps; None for a model of transformers."""
    # Only models of diffusers have this method, and importing diffusers takes seconds.
    return next((part for part in model.modules() if hasattr(type(part), "enable_gradient_checkpointing")), None)


def _layers(model: nn.Module) -> Iterator[Any]:
    # Importing transformers takes seconds, and most of what imports this package runs no model.
    from transformers.modeling_layers import GradientCheckpointingLayer

    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def enable_recomputation(model: nn.Module) -> None:
    """Let the layers recompute their activations in the backward pass, while `recompute_layers` says so.

    Raises:
        InputError: the model has no layers that can.
    """
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
        layer._gradient_checkpointing_func = partial(_run, layer)


def recompute_layers(model: nn.Module, recompute: bool) -> None:
    """Switch recomputation on or off in a model whose dropout is off.

    Layers are checkpointed only in training mode, so the layers are set to it and the modules inside are not.
    """
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


def differing_shapes(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names that one side lacks or has in another shape."""
    return sorted(
        name
        for name in stored.keys() | expected.keys()
        if name not in stored or name not in expected or stored[name].shape != expected[name].shape
    )
