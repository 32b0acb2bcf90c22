"""Write an optimizer's state as named tensors, and read it back.

An entry is called `<parameter>|<moment>`; `<parameter>|none`, without elements, stands for a parameter that never had
a gradient. The entry `|optimizer` is the kind of optimizer as ASCII codes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.optimizer.kinds import OptimizerKind

KIND = "|optimizer"
UNTOUCHED = "none"

# bitsandbytes keeps smaller parameters' moments in fp32, and scales 8-bit moments in blocks of this many.
_SMALLEST_IN_8_BITS = 4096
_BLOCK = 256
_CODES = 256

Layout = dict[str, tuple[torch.Size, torch.dtype]]


def write_state(
    kind: OptimizerKind, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Copy the optimizer's state to the CPU."""
    state = {KIND: torch.tensor(list(kind.encode()), dtype=torch.uint8)}
    for name, parameter in parameters.items():
        moments = optimizer.state.get(parameter) or {UNTOUCHED: torch.zeros(0)}
        for key, value in sorted(moments.items()):
            # bitsandbytes counts its steps in plain numbers.
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
            state[f"{name}|{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    return state


def read_state(
    kind: OptimizerKind, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Check all moments and return those of each parameter that has some.

    Raises:
        InputError: the state is another kind of optimizer's.
        ValueError: it is of other parameters, of other shapes or dtypes, or incomplete.
    """
    _refuse_another_kind(kind, state)
    loaded: dict[str, dict[str, Tensor]] = {}
    for entry, value in state.items():
        name, _, key = entry.rpartition("|")
        if entry == KIND:
            continue
        if name not in parameters:
            raise ValueError(f"the optimizer state has {name!r}, which this policy does not train")
        loaded.setdefault(name, {})[key] = value
    for name, parameter in parameters.items():
        found = {key: (value.shape, value.dtype) for key, value in loaded.get(name, {}).items()}
        expected = _layout(kind, parameter)
        if found != expected and found.keys() != {UNTOUCHED}:
            raise ValueError(f"the optimizer state of {name!r} has {found}, not {expected}")
    return {name: moments for name, moments in loaded.items() if UNTOUCHED not in moments}


def _refuse_another_kind(kind: OptimizerKind, state: Mapping[str, Tensor]) -> None:
    if KIND not in state:
        raise ValueError("the optimizer state does not say which optimizer it belongs to")
    stored = bytes(state[KIND].tolist()).decode()
    if stored != kind:
        hint = f"The policy was trained with {stored}, and its moments are stored that way; continue with {stored}."
        raise InputError("update.optimizer", kind, hint)


def _layout(kind: OptimizerKind, parameter: nn.Parameter) -> Layout:
    """Return shapes and dtypes of a parameter's moments."""
    shape, scalar = parameter.shape, torch.Size([])
    if kind == "adamw":
        moment = (shape, parameter.dtype)
        return {"step": (scalar, torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
    if not kind.endswith("8bit") or parameter.numel() < _SMALLEST_IN_8_BITS:
        moment = (shape, torch.float32)
        return {"step": (scalar, torch.int64), "state1": moment, "state2": moment}
    blocks = torch.Size([-(-parameter.numel() // _BLOCK)])
    layout: Layout = {"step": (scalar, torch.int64)}
    for number in ("1", "2"):
        layout[f"state{number}"] = (shape, torch.uint8)
        layout[f"qmap{number}"] = (torch.Size([_CODES]), torch.float32)
        layout[f"absmax{number}"] = (blocks, torch.float32)
    return layout


def take_state(
    kind: OptimizerKind,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loaded: Mapping[str, dict[str, Tensor]],
) -> None:
    """Copy the moments of `read_state` into the optimizer."""
    for index, (name, parameter) in enumerate(parameters.items()):
        if name not in loaded:
            optimizer.state.pop(parameter, None)
        elif kind == "adamw":
            # torch keeps its step counters on the CPU.
            optimizer.state[parameter] = {
                key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, value in loaded[name].items()
            }
        else:
            _take_quantized(optimizer, parameter, index, loaded[name])


def _take_quantized(optimizer: Any, parameter: nn.Parameter, index: int, moments: Mapping[str, Tensor]) -> None:
    """Copy into buffers that bitsandbytes allocates: paged memory is not ordinary memory."""
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    if parameter.device.type == "cuda":
        # Pages are zeroed asynchronously; the copy has to come after that.
        torch.cuda.synchronize(parameter.device)
    held = optimizer.state[parameter]
    for key, value in moments.items():
        if key == "step":
            held[key] = int(value)
        elif key.startswith("qmap"):
            # One table for all parameters, unless the state was written with another.
            same = torch.equal(held[key].to("cpu"), value.to("cpu"))
            held[key] = held[key] if same else value.to(parameter.device, copy=True)
        else:
            held[key].copy_(value)
