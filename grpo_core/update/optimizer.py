"""The optimizer of one policy, of torch or bitsandbytes.

Its state is stored as named tensors, without pickle: `<parameter>|<moment>`; `<parameter>|none`, without elements,
stands for a parameter that never had a gradient. The entry `|optimizer` is the kind of optimizer as ASCII codes.
"""

from collections.abc import Container, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.offload import pin
from grpo_core.update.optimizer_kinds import IN_TORCH, OPTIMIZERS, OptimizerKind
from grpo_core.update.settings import OptimizerSettings

KIND = "|optimizer"
UNTOUCHED = "none"

# bitsandbytes keeps smaller parameters' moments in fp32, and scales 8-bit moments in blocks of this many.
_SMALLEST_IN_8_BITS = 4096
_BLOCK = 256
_CODES = 256


def refuse_unavailable(kind: OptimizerKind, device: torch.device) -> None:
    """Raise InputError for an optimizer that this machine cannot run, before any model is loaded."""
    if OPTIMIZERS[kind].library == IN_TORCH:
        return
    if find_spec("bitsandbytes") is None:
        hint = "It needs bitsandbytes, the extra of that name (pip install bitsandbytes); or use adamw."
        raise InputError("update.optimizer", kind, hint)
    if kind.startswith("paged") and device.type != "cuda":
        hint = f"Paged states need CUDA, and the model is on {device.type}; use {kind.removeprefix('paged_')}."
        raise InputError("update.optimizer", kind, hint)


class PolicyOptimizer:
    """The optimizer of one policy, from step to step and from iteration to iteration."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        *,
        steps: int = 0,
        undecayed: Container[str] = (),
    ) -> None:
        """Build the optimizer after this many steps of the schedule; no weight decay of the undecayed parameters."""
        self.parameters = dict(parameters)
        self.steps = steps
        self._kind, self._traits = settings.optimizer, OPTIMIZERS[settings.optimizer]
        self._schedule = settings.schedule()
        self._optimizer = self._built(settings, undecayed)

    def _built(self, settings: OptimizerSettings, undecayed: Container[str]) -> Any:
        trained = list(self.parameters.values())
        decayed = [each for name, each in self.parameters.items() if name not in undecayed]
        others = [each for name, each in self.parameters.items() if name in undecayed]
        parts = ((decayed, settings.weight_decay), (others, 0.0))
        groups = [{"params": part, "weight_decay": decay} for part, decay in parts if part]
        given = {"betas": settings.betas, "eps": settings.eps, **settings.optimizer_kwargs}
        if self._traits.library != IN_TORCH:
            for device in {parameter.device for parameter in trained}:
                refuse_unavailable(self._kind, device)
            return self._traits.make(groups, self.learning_rate, given)
        if settings.offload_optimizer:
            return _OffloadedAdamW(groups, {"lr": self.learning_rate, **given})
        if self._traits.matrices:
            self._refuse_others()
            return self._traits.make(groups, self.learning_rate, given)
        # Its import takes seconds, and every command that reads a configuration imports this module.
        from torch.distributed.tensor import DTensor

        # Multi-tensor steps do not accept full and sharded parameters together.
        mixed = len({isinstance(parameter, DTensor) for parameter in trained}) > 1
        return self._traits.make(groups, self.learning_rate, given, foreach=False if mixed else None)

    def _refuse_others(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.dim() != 2:
                hint = f"It has steps for matrices only, and {name} is {[*parameter.shape]}: use adamw."
                raise InputError("update.optimizer", self._kind, hint)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._schedule(self.steps)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Make one optimizer step at the scheduled learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state on the CPU as named tensors; `steps` is not part of it.

        Those of parameters on the CPU are the optimizer's own: the next step changes them.
        """
        state = {KIND: torch.tensor(list(self._kind.encode()), dtype=torch.uint8)}
        for name, parameter in self.parameters.items():
            kept = self._optimizer.state.get(parameter) or {}
            moments = {key: value for key, value in kept.items() if value is not None}
            for key, value in sorted((moments or {UNTOUCHED: torch.zeros(0)}).items()):
                # bitsandbytes counts its steps in plain numbers.
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
                state[f"{name}|{key}"] = tensor.detach().cpu().contiguous()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; a refused state changes nothing.

        InputError for another kind of optimizer; ValueError for other parameters, shapes or dtypes, or missing ones.
        """
        loaded = self._checked(state)
        if self.steps and not loaded and any(self._layout(parameter) for parameter in self.parameters.values()):
            raise ValueError(f"the optimizer state is empty, but {self.steps} steps were made with it")
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if name not in loaded:
                self._optimizer.state.pop(parameter, None)
            elif self._traits.library == IN_TORCH:
                # torch keeps its step counters on the CPU.
                moments = loaded[name].items()
                if isinstance(self._optimizer, _OffloadedAdamW):
                    self._optimizer.state[parameter] = {key: _on_host(value, parameter) for key, value in moments}
                    continue
                self._optimizer.state[parameter] = {
                    key: value.to("cpu" if key == "step" else parameter.device, copy=True) for key, value in moments
                }
            else:
                self._load_quantized(parameter, index, loaded[name])

    def _checked(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        if KIND not in state:
            raise ValueError("the optimizer state does not say which optimizer it belongs to")
        stored = bytes(state[KIND].tolist()).decode()
        if stored != self._kind:
            hint = f"The policy was trained with {stored}, and its moments are stored that way; continue with {stored}."
            raise InputError("update.optimizer", self._kind, hint)
        loaded: dict[str, dict[str, Tensor]] = {}
        for entry, value in state.items():
            name, _, key = entry.rpartition("|")
            if entry == KIND:
                continue
            if name not in self.parameters:
                raise ValueError(f"the optimizer state has {name!r}, which this policy does not train")
            loaded.setdefault(name, {})[key] = value
        for name, parameter in self.parameters.items():
            found = {key: (value.shape, value.dtype) for key, value in loaded.get(name, {}).items()}
            expected = self._layout(parameter)
            if found != expected and found.keys() != {UNTOUCHED}:
                raise ValueError(f"the optimizer state of {name!r} has {found}, not {expected}")
        return {name: moments for name, moments in loaded.items() if UNTOUCHED not in moments}

    def _layout(self, parameter: nn.Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of what the optimizer keeps of a parameter after a step."""
        shape, scalar, moment = parameter.shape, torch.Size([]), (parameter.shape, parameter.dtype)
        if self._kind == "adamw":
            return {"step": (scalar, torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
        if self._kind == "adafactor":
            factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
            kept = factors if len(shape) > 1 else {"variance": shape}
            sizes = {key: (torch.Size(size), parameter.dtype) for key, size in kept.items()}
            return {"step": (scalar, torch.float32), **sizes}
        if self._traits.library == IN_TORCH:
            return {"momentum_buffer": moment} if self._optimizer.defaults["momentum"] else {}
        layout = {"step": (scalar, torch.int64)}
        for number in map(str, range(1, 1 + self._traits.moments)):
            if not self._kind.endswith("8bit") or parameter.numel() < _SMALLEST_IN_8_BITS:
                layout[f"state{number}"] = (shape, torch.float32)
            else:
                layout[f"state{number}"] = (shape, torch.uint8)
                layout[f"qmap{number}"] = (torch.Size([_CODES]), torch.float32)
                layout[f"absmax{number}"] = (torch.Size([-(-parameter.numel() // _BLOCK)]), torch.float32)
        return layout

    def _load_quantized(self, parameter: nn.Parameter, index: int, moments: Mapping[str, Tensor]) -> None:
        """Copy into buffers that bitsandbytes allocates: paged memory is not ordinary memory."""
        self._optimizer.init_state(self._optimizer.param_groups[0], parameter, 0, index)
        if parameter.device.type == "cuda":
            # Pages are zeroed asynchronously; the copy has to come after that.
            torch.cuda.synchronize(parameter.device)
        held = self._optimizer.state[parameter]
        for key, value in moments.items():
            if key == "step":
                held[key] = int(value)
            elif key.startswith("qmap"):
                # One table for all parameters, unless the state was written with another.
                same = torch.equal(held[key].to("cpu"), value.to("cpu"))
                held[key] = held[key] if same else value.to(parameter.device, copy=True)
            else:
                held[key].copy_(value)


class _OffloadedAdamW:
    """AdamW of torch, whose moments are in CPU memory, pinned for a GPU, and on the device for one parameter at a time.

    `param_groups` has a group for each parameter, `state` the moments by parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
        self._optimizers = {
            each: torch.optim.AdamW([each], weight_decay=group["weight_decay"], **values)
            for group in groups
            for each in group["params"]
        }
        self.param_groups = [group for each in self._optimizers.values() for group in each.param_groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for parameter, optimizer in self._optimizers.items():
            if parameter.grad is None:
                continue
            kept = self.state.get(parameter, {})
            if kept:
                optimizer.state[parameter] = {
                    # torch keeps its step counters on the CPU.
                    key: value.to("cpu" if key == "step" else parameter.device, copy=True, non_blocking=True)
                    for key, value in kept.items()
                }
            optimizer.step()
            for key, value in optimizer.state.pop(parameter).items():
                if key in kept:
                    # Into the same pinned memory, and complete before it is read.
                    kept[key].copy_(value)
                else:
                    self.state.setdefault(parameter, {})[key] = _on_host(value, parameter)


def _on_host(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Copy a moment into CPU memory, pinned where its parameter is on a GPU."""
    pinned = parameter.device.type == "cuda" and value.dim() > 0
    large = value.nbytes >= _OWN_PAGES
    host = torch.empty_like(value, device="cpu", pin_memory=pinned and not large)
    if pinned and large:
        pin(host)
    return host.copy_(value)


_OWN_PAGES = 32 * 1024**2
"""Bytes from which the C library never gives memory that shares its pages."""
