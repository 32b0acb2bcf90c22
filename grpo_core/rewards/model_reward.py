"""Rewards computed by a network: where it runs, in which precision, and the weight files that it needs."""

import abc
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.backends import cudnn

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Reward
from grpo_core.rewards.weights.source import Weights

Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")]

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{8,64}$")]
"""A sha256 in hexadecimal, complete or at least its first 8 digits."""

_Model = TypeVar("_Model")
_P = ParamSpec("_P")
_ON_CUDA = threading.Lock()
_MAX_LOADED = 4


@dataclass(frozen=True, config=STRICT)
class ModelReward(Reward):
    """A reward computed by a network with weight files.

    Attributes:
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    device: Device = "cpu"

    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "weights", "weights_sha256"})

    def __post_init__(self) -> None:
        self.weight_sources()

    @abc.abstractmethod
    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the weights by role.

        Raises:
            InputError: a setting cannot be the name of weights.
        """

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


@contextmanager
def exact_inference(device: str) -> Iterator[None]:
    """Run without gradients, deterministically, and in the precision of the tensors.

    One thread at a time on CUDA.
    """
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
    """Decorate a loader of weights: a process loads each model once, by their digest; other threads wait for it.

    The other arguments must be hashable. Files that have changed are loaded again.
    """
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
