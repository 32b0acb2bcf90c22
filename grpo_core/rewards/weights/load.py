"""Load checked weights without running code from them: a file's tensors into a network, or a transformers model."""

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_core.rewards.weights.source import SAFETENSORS, Weights, weights_pattern

_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError),
)
"""What torch.load and safetensors raise for a file with bytes that are missing or wrong; torch checks few of them."""

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load_state_dict(weights: Weights) -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file, or of a PyTorch file without running code from it; on the CPU.

    A checkpoint with the tensors under ``state_dict`` is accepted.

    Raises:
        InputError: as :meth:`Weights.path`; another kind of file, or one with other content than named tensors.
    """
    file = Path(weights.path()).expanduser()
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = f"It cannot be read as a state dict ({reason}). Set a complete .safetensors file or torch.save file."
        raise weights.error(hint) from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise weights.error("It does not contain named tensors. Set a file with the state dict.")
    return loaded


def load_weights(weights: Weights, network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
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
            raise weights.error(f"In this file {name} {found}. Set the weights of {what}.")
    left_over = sorted(tensors.keys() - wanted.keys())
    if left_over:
        raise weights.error(f"This file has {left_over[0]}, which {what} has not. Set the weights of {what}.")
    state = {name: tensors[name].reshape(like.shape).to(like.dtype) for name, like in wanted.items()}
    network.load_state_dict(state, assign=True)


def load_model(weights: Weights, model_class: Any, **settings: object) -> nn.Module:
    """Load the model in fp32 on the CPU, frozen and in evaluation mode; .safetensors, or weights without code.

    Raises:
        InputError: as :meth:`Weights.path`; the files are broken, contain code, or are of another kind of model.
    """
    folder, kind = Path(weights.path()), model_class.__name__
    try:
        model, report = model_class.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=weights_pattern(folder) == SAFETENSORS,
            weights_only=True,
            dtype=torch.float32,
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise weights.error(f"It cannot be loaded as {kind} ({_reason(error)}). Set a complete {kind}.") from error
    # transformers fills what it does not find with random numbers, and only logs that.
    broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if broken:
        raise weights.error(f"Its weights lack {broken[0]} ({len(broken)} such). Set a complete {kind}.")
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def load_tokenizer(weights: Weights) -> Any:
    """Load the model's tokenizer.

    Raises:
        InputError: as :meth:`Weights.path`; the tokenizer is missing or broken.
    """
    from transformers import AutoTokenizer

    folder = Path(weights.path())
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise weights.error("The folder has no tokenizer. Copy tokenizer.json of the model's base model into it.")
    try:
        # The tokenizers package raises a bare Exception for a truncated file.
        for file in folder.glob("tokenizer*.json"):
            json.loads(file.read_text(encoding="utf-8"))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise weights.error(f"Its tokenizer cannot be loaded ({_reason(error)}). Set a complete model.") from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
