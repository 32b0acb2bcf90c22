"""Adapters added to the weights while sampling, so that a layer takes one matrix product in place of three."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Add the LoRA adapters to copies of the weights they adapt; the weights themselves come back to the bit.

    Only weights in fp32 or fp64 in CPU memory: in 16 bits the sum loses most of a small adapter, and on a GPU the
    copies would take memory that the cache needs. The other layers compute with their adapters as ever.

    A merged layer takes the place of its wrapper, whose own forward pass costs as much as a small matrix product.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    originals: list[tuple[nn.Module, str, Any, dict[nn.Parameter, torch.Tensor]]] = []
    try:
        for parent, name, layer in _lora_layers(model):
            base = layer.get_base_layer()
            parameters = list(base.parameters())
            # A tied weight is also read where there is no adapter.
            if all(_can_be_copied(each) and uses[id(each)] == 1 for each in parameters):
                originals.append((parent, name, layer, {each: each.data for each in parameters}))
                for each in parameters:
                    each.data = each.data.clone()
                with torch.no_grad():
                    layer.merge()
                setattr(parent, name, base)
        yield
    finally:
        for parent, name, layer, values in originals:
            setattr(parent, name, layer)
            layer.merged_adapters.clear()
            for parameter, value in values.items():
                parameter.data = value


def _lora_layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the layers with adapters, each with the module that it is a part of and its name there."""
    # Importing peft takes seconds, and most of what imports this package builds no adapters.
    from peft.tuners.lora import Linear

    # A variant, such as DoRA, keeps values of its own when it is merged.
    return [
        (parent, name, each)
        for parent in model.modules()
        for name, each in parent.named_children()
        if type(each) is Linear and not each.lora_variant
    ]


def _can_be_copied(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64)
