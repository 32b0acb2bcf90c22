"""Gradient checkpointing without dropout."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_core.errors import InputError


def _layers(model: nn.Module) -> Iterator[Any]:
    # Importing transformers takes seconds, and most of what imports this package runs no model.
    from transformers.modeling_layers import GradientCheckpointingLayer

    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def enable_recomputation(model: nn.Module) -> None:
    """Let the layers recompute their activations in the backward pass, while `recompute_layers` says so.

    Raises:
        InputError: the model has no layers that can.
    """
    layers = list(_layers(model))
    if not layers:
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
