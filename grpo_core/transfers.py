"""Several tensors between the CPU and a device in one transfer: a GPU runs dry while the host makes one for each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU, in the dtypes of the tensors."""
    return _moved(tensors, torch.device("cpu")) if tensors else []


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the CPU on a device, without a wait; on the CPU they are returned as they are."""
    return list(tensors) if device.type == "cpu" or not tensors else _moved(tensors, device)


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    kinds = {each.is_floating_point() for each in tensors if each.dtype != torch.bool}
    assert len(kinds) <= 1, "a float does not hold every id"
    # Joined in the widest of their dtypes, which holds the values of the others.
    joined = torch.cat([each.flatten() for each in tensors]).to(device, non_blocking=device.type != "cpu")
    parts = joined.split([each.numel() for each in tensors])
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, tensors, strict=True)]
