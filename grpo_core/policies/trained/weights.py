"""Stored weights against those that a model has."""

from collections.abc import Mapping

from torch import Tensor


def differing_shapes(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names that one side lacks or has in another shape."""
    return sorted(
        name
        for name in stored.keys() | expected.keys()
        if name not in stored or name not in expected or stored[name].shape != expected[name].shape
    )


def on_cpu(value: Tensor) -> Tensor:
    """A copy that takes no accelerator memory; a tensor without values has none to copy."""
    return value if value.is_meta else value.detach().to("cpu", copy=True)
