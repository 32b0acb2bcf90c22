"""Rewards computed by a network: where it runs, in which precision, and how its checked weights are loaded."""

import abc
import functools
import itertools
import json
import math
import pickle
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import safetensors.torch
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.backends import cudnn

from grpo_core.errors import InputError, first_line
from grpo_core.hub import SAFETENSORS
from grpo_core.rewards.reward import STRICT, Reward
from grpo_core.rewards.weights import Weights, weights_pattern
from grpo_core.uses import Uses

_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError),
)
"""What torch.load and safetensors raise for a file with bytes that are missing or wrong; torch checks few of them."""

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load_state_dict(weights: Weights) -> dict[str, Tensor]:
    """Load the tensors, or those under ``state_dict``, of a .safetensors or PyTorch file on the CPU, without its code.

    InputError as :meth:`Weights.path`, and for other content.
    """
    file = Path(weights.path()).expanduser()
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        hint = "Set a complete .safetensors file or torch.save file."
        raise weights.error(f"It cannot be read as a state dict ({first_line(error)}). {hint}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise weights.error("It does not contain named tensors. Set a file with the state dict.")
    return loaded


def load_weights(weights: Weights, network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load these tensors, all and no other, in fp32 into the network, which may be on the meta device; or InputError.

    `weights` and `what`, the network in words, are for messages.
    """
    wanted, remedy = network.state_dict(), f"Set the weights of {what}."
    found = {name: find_tensor(weights, tensors, name, like.shape, remedy) for name, like in wanted.items()}
    left_over = sorted(tensors.keys() - wanted.keys())
    if left_over:
        raise weights.error(f"This file has {left_over[0]}, which {what} has not. {remedy}")
    network.load_state_dict({name: found[name].to(like.dtype) for name, like in wanted.items()}, assign=True)


def find_tensor(
    weights: Weights, tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], remedy: str
) -> Tensor:
    """Return a file's tensor of this name in this shape, or raise InputError, whose message `remedy` ends."""
    tensor = tensors.get(name)
    # A scale is a number to some writers and a vector of one to others.
    if tensor is None or (tuple(tensor.shape) != tuple(shape) and not (tensor.numel() == math.prod(shape) == 1)):
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(shape)}"
        raise weights.error(f"In this file {name} {found}. {remedy}")
    return tensor.reshape(tuple(shape))


def load_model(weights: Weights, model_class: Any, **settings: object) -> nn.Module:
    """Load the model in fp32 on the CPU, frozen and in evaluation mode, from weights without code; or InputError."""
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
        raise weights.error(f"It cannot be loaded as {kind} ({first_line(error)}). Set a complete {kind}.") from error
    # transformers fills what it does not find with random numbers, and only logs that.
    broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if broken:
        raise weights.error(f"Its weights lack {broken[0]} ({len(broken)} such). Set a complete {kind}.")
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def load_tokenizer(weights: Weights) -> Any:
    """Load the model's tokenizer; InputError as :meth:`Weights.path`, and if it is missing or broken."""
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
        raise weights.error(f"Its tokenizer cannot be loaded ({first_line(error)}). Set a complete model.") from error


Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$"), Uses.NOTHING]

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{8,64}$"), Uses.NOTHING]
"""A sha256 in hexadecimal, complete or at least its first 8 digits."""

_Model = TypeVar("_Model")
_Row = TypeVar("_Row")
_P = ParamSpec("_P")
_ON_CUDA = threading.Lock()
_MAX_LOADED = 4


@dataclass(frozen=True, config=STRICT)
class ModelReward(Reward):
    """A reward computed by a network with weight files.

    Attributes:
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``; ``auto``: the GPU of this process, or the CPU where
            there is none. A run takes ``auto`` for the policy's GPU if the estimate finds room beside the policy.
        batch_size: samples in a pass of the network. Above 1 the last digits of a score depend on the samples beside
            it, and the size is part of its provenance.
        dtype: of weights and passes. bfloat16 keeps two to three digits, and is part of the provenance.
    """

    device: Device = "cpu"
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"

    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "weights", "weights_sha256"})

    def __post_init__(self) -> None:
        self.weight_sources()

    @property
    def runs_on(self) -> "Placed":
        """Where the network is, and in which precision."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Placed("cuda:0" if device == "cuda" else device, getattr(torch, self.dtype))

    @property
    def batching(self) -> Mapping[str, object]:
        """The settings of its passes that change scores: those that are not the usual ones."""
        usual = {"batch_size": 1, "dtype": "float32"}
        return {name: value for name in usual if (value := getattr(self, name)) != usual[name]}

    def settings(self) -> Mapping[str, object]:
        """Return what determines the scores."""
        own = {name: value for name, value in super().settings().items() if name not in ("batch_size", "dtype")}
        return {**own, **self.batching}

    @abc.abstractmethod
    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the weights by role; InputError for a setting that cannot be the name of weights."""

    def weight_digests(self) -> Mapping[str, str]:
        """Return the digest of each role's weights."""
        return {role: weights.digest() for role, weights in self.weight_sources().items()}

    def preflight(self) -> Sequence[str]:
        """List missing or wrong weights and a missing device."""
        problems = [weights.problem() for weights in self.weight_sources().values()]
        if self.device.startswith("cuda"):
            seen, index = torch.cuda.device_count(), torch.device(self.device).index or 0
            hint = f"PyTorch sees {seen} CUDA device(s); set cpu."
            problems += [] if index < seen else [InputError(f"rewards.{self.name}.device", self.device, hint)]
        return [str(problem) for problem in problems if problem is not None]


@plain_dataclass(frozen=True)
class Placed:
    """A device and the precision of a network there."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def batched(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Cut rows into lists of `size`, the last with what is left."""
    remaining = iter(rows)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


@contextmanager
def exact_inference(device: str) -> Iterator[None]:
    """Run without gradients, deterministically, in the precision of the tensors; on CUDA one thread at a time."""
    kind = torch.device(device).type
    # Flat patches have features near zero, which half precision divides into NaN; TF32 keeps 10 bits only.
    with torch.inference_mode(), torch.autocast(kind, enabled=False):
        if kind != "cuda":
            yield
            return
        # These switches belong to the process: a thread that ends would switch TF32 on under another.
        with _ON_CUDA, cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            previous = torch.get_float32_matmul_precision()
            # For cuBLAS's matrix products, which cuDNN's switch does not cover.
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(previous)


def load_once(load: Callable[Concatenate[Weights, _P], _Model]) -> Callable[Concatenate[Weights, _P], _Model]:
    """Decorate a loader of weights: a process loads each model once, by their digest, for all threads."""
    loaded: OrderedDict[tuple[object, ...], _Model] = OrderedDict()
    loading = threading.Lock()

    @functools.wraps(load)
    def locked(weights: Weights, /, *args: _P.args, **kwargs: _P.kwargs) -> _Model:
        key = weights.digest(), *args, *kwargs.items()
        with loading:
            if key not in loaded:
                loaded[key] = load(weights, *args, **kwargs)
                if len(loaded) > _MAX_LOADED:
                    loaded.popitem(last=False)
            loaded.move_to_end(key)
            return loaded[key]

    return locked
