"""Other values in the place of the trained ones, for as long as they are needed, and their moving average."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def copied(parameters: Mapping[str, nn.Parameter], device: torch.device | None = None) -> dict[str, Tensor]:
    """A copy of the values, where they are or on another device; a tensor without values has none to copy."""
    return {
        name: value.detach() if value.is_meta else value.detach().to(device or value.device, copy=True)
        for name, value in parameters.items()
    }


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, each parameter has the other value, and `values` keeps the parameter's own.

    No tensor is made or moved for good: beyond both sets there is one parameter's copy at a time. A graph that was
    built over the parameters before cannot be run backwards afterwards; torch refuses it.

    Args:
        parameters: changed in place.
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
        own = parameter.detach().to(values[name].device, copy=True)
        parameter.copy_(values[name])
        values[name].copy_(own)
    # An autocast that is open around this has kept the previous values in 16 bits.
    torch.clear_autocast_cache()


@torch.no_grad()
def mix_into(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], mix: float) -> None:
    """Make the values mix * parameters + (1 - mix) * values, in fp32, rounded once to the values' dtype.

    Args:
        values: changed in place, where they are.
        parameters: of the same names and shapes, on any device.
        mix: share of the parameters, 0 < mix <= 1.

    Raises:
        ValueError: mix is outside its range.
    """
    if not 0 < mix <= 1:
        raise ValueError(f"mix is {mix}; it has to be above 0 and at most 1")
    for name, parameter in parameters.items():
        own = parameter.detach().to(values[name].device, torch.float32)
        # 0 times an infinite value is no number.
        mixed = own if mix == 1 else mix * own + (1 - mix) * values[name].float()
        values[name].copy_(mixed)
