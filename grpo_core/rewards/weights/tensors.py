"""What is in a weight file, read without running code from it, and whether it fits the network that it is for."""

import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_core.errors import InputError

_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError),
)
"""What torch.load and safetensors raise for a file with bytes that are missing or wrong; torch checks few of them."""


def load_state_dict(place: str, path: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a PyTorch file without running code from it; on the CPU.

    A checkpoint that holds them under ``state_dict``, beside other things, is accepted.

    Raises:
        InputError: not such a file, or one that holds something else than named tensors.
    """
    file = Path(path).expanduser()

    def read() -> object:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)

    return _named_tensors(place, path, read)


def tensor_shapes(place: str, path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a weight file's tensors; their numbers stay on the disk.

    Raises:
        InputError: as :func:`load_state_dict`.
    """
    file = Path(path).expanduser()

    def read() -> object:
        if file.suffix == ".safetensors":
            with safetensors.safe_open(file, framework="pt") as stream:
                names = tuple(stream.keys())
                return {name: torch.empty(stream.get_slice(name).get_shape(), device="meta") for name in names}
        return torch.load(file, map_location="meta", weights_only=True)

    return {name: tuple(tensor.shape) for name, tensor in _named_tensors(place, path, read).items()}


def _named_tensors(place: str, path: str, read: Callable[[], object]) -> dict[str, Tensor]:
    try:
        loaded = read()
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = f"It cannot be read as a state dict ({reason}). Give a complete .safetensors file or torch.save file."
        raise InputError(place, path, hint) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(place, path, "It does not hold named tensors. Give the state dict itself.")
    return loaded


def load_weights(place: str, path: str, network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Give the network these tensors in fp32, every one of its own and nothing else.

    The network may stand on the meta device: its parameters are replaced, not filled.

    Args:
        place: of the setting that holds the file, for messages.
        path: the file that the tensors were read from.
        network: to be filled.
        tensors: by the network's own names.
        what: the network in words, for messages.

    Raises:
        InputError: a tensor is missing, left over or of another shape.
    """
    wanted = network.state_dict()
    for name, like in wanted.items():
        tensor = tensors.get(name)
        # A scale is a number to some writers and a vector of one to others.
        if tensor is None or (tensor.shape != like.shape and not (tensor.numel() == like.numel() == 1)):
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(like.shape)}"
            raise InputError(place, path, f"In this file {name} {found}. Give the weights of {what}.")
    left_over = sorted(tensors.keys() - wanted.keys())
    if left_over:
        hint = f"This file holds {left_over[0]}, which {what} has not. Give the weights of {what}."
        raise InputError(place, path, hint)
    state = {name: tensors[name].reshape(like.shape).to(like.dtype) for name, like in wanted.items()}
    network.load_state_dict(state, assign=True)
