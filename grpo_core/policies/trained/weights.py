"""Compare stored weights with a model's."""

from collections.abc import Mapping

from torch import Tensor


def differing_shapes(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names that one side lacks or has in another shape."""
    return sorted(
        name
        for name in stored.keys() | expected.keys()
        if name not in stored or name not in expected or stored[name].shape != expected[name].shape
    )


def on_cpu(value: Tensor) -> Tensor:
    """Copy to CPU memory; meta tensors are returned unchanged."""
    return value if value.is_meta else value.detach().to("cpu", copy=True)
