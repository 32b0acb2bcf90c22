"""AdamW of torch, and with 8-bit and paged states of bitsandbytes."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grpo_core.errors import InputError

OptimizerKind = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]

_IN_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def refuse_unavailable(kind: OptimizerKind, device: torch.device) -> None:
    """Refuse an optimizer that this machine cannot run, before any model is loaded.

    Args:
        kind: of the optimizer.
        device: of the parameters.

    Raises:
        InputError: bitsandbytes is not installed, or a paged optimizer without CUDA.
    """
    if kind == "adamw":
        return
    if find_spec("bitsandbytes") is None:
        hint = "It needs bitsandbytes, the extra eight-bit (pip install bitsandbytes); or use adamw."
        raise InputError("update.optimizer", kind, hint)
    if kind.startswith("paged") and device.type != "cuda":
        hint = f"Paged states need CUDA, and the model is on {device.type}; use {kind.removeprefix('paged_')}."
        raise InputError("update.optimizer", kind, hint)


def build_optimizer(
    kind: OptimizerKind,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Build the optimizer at step 0.

    Raises:
        InputError: it cannot be run on this machine.
    """
    trained = list(parameters)
    values: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if kind == "adamw":
        # Multi-tensor steps do not accept full and sharded parameters together.
        mixed = len({isinstance(parameter, DTensor) for parameter in trained}) > 1
        return torch.optim.AdamW(trained, foreach=False if mixed else None, **values)
    for device in {parameter.device for parameter in trained}:
        refuse_unavailable(kind, device)
    found: torch.optim.Optimizer = getattr(import_module("bitsandbytes.optim"), _IN_BITSANDBYTES[kind])(
        trained, **values
    )
    return found
