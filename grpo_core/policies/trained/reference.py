"""Swap other values in for the trained ones while they are needed, and keep their moving average."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def copied(parameters: Mapping[str, nn.Parameter], device: torch.device | None = None) -> dict[str, Tensor]:
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
        parameters: of the same names and shapes, on any device.
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
