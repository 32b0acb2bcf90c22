"""What a weight file contains, read without running code from it, and whether it fits a network."""

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.weights.files import WeightFile

_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError),
)
"""What torch.load and safetensors raise for a file with bytes that are missing or wrong; torch checks few of them."""


def load_state_dict(weights: WeightFile) -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file, or of a PyTorch file without running code from it; on the CPU.

    A checkpoint with the tensors under ``state_dict`` is accepted.

    Raises:
        InputError: another kind of file, or one with other content than named tensors.
    """
    file = Path(weights.path).expanduser()
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = f"It cannot be read as a state dict ({reason}). Set a complete .safetensors file or torch.save file."
        raise InputError(weights.place, weights.path, hint) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        hint = "It does not contain named tensors. Set a file with the state dict."
        raise InputError(weights.place, weights.path, hint)
    return loaded


def load_weights(weights: WeightFile, network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load these tensors in fp32 into the network: all of its tensors, and no other.

    The network may be on the meta device: its parameters are replaced, not filled. `weights` and `what`, the network in
    words, are for messages.

    Raises:
        InputError: a tensor is missing, left over or of another shape.
    """
    wanted = network.state_dict()
    for name, like in wanted.items():
        tensor = tensors.get(name)
        # A scale is a number to some writers and a vector of one to others.
        if tensor is None or (tensor.shape != like.shape and not (tensor.numel() == like.numel() == 1)):
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(like.shape)}"
            raise InputError(weights.place, weights.path, f"In this file {name} {found}. Set the weights of {what}.")
    left_over = sorted(tensors.keys() - wanted.keys())
    if left_over:
        hint = f"This file has {left_over[0]}, which {what} has not. Set the weights of {what}."
        raise InputError(weights.place, weights.path, hint)
    state = {name: tensors[name].reshape(like.shape).to(like.dtype) for name, like in wanted.items()}
    network.load_state_dict(state, assign=True)
