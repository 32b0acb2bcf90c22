"""Frozen weights off the device while other components work: in CPU memory, pinned where the device is a GPU.

A policy encloses its work in `ComponentOffload.using`. Components stay on the device after it, until another one is
needed there. Values never change on the way.
"""

import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.quantization import is_quantized

PLACE = "policy.offload"
GIB = 1024**3
_ALIGNMENT = 256
"""Bytes; a GPU's allocations start at multiples of it."""


class _Parked:
    """The frozen values of a component, in one buffer of CPU memory, which is copied to the device at once."""

    def __init__(self, name: str, component: nn.Module, device: torch.device) -> None:
        """Copy the values from where they are, and leave placeholders there; InputError if CPU memory is too small."""
        slots = {(id(owner), name): (owner, name) for owner, name in _frozen_slots(component)}.values()
        held = [(owner, name, getattr(owner, name)) for owner, name in slots]
        movable = [(owner, name, value) for owner, name, value in held if value.numel() and not value.is_meta]
        self._device, self._slots = device, [(owner, name, _key(value)) for owner, name, value in movable]
        # Modules share parameters, and layers their scales.
        values = {_key(value): value for _, _, value in movable}
        self._forms = {key: torch.empty_like(value, device="meta") for key, value in values.items()}
        self._starts, end = dict[_Key, int](), 0
        for key, value in values.items():
            # Matrix products on a CPU round differently over addresses that are aligned otherwise.
            self._starts[key] = -(-end // _ALIGNMENT) * _ALIGNMENT + value.data_ptr() % _CPU_ALIGNMENT
            end = self._starts[key] + value.nbytes
        self.nbytes = sum(value.nbytes for value in values.values())
        refuse_too_little_room({name: end})
        self._buffer = torch.empty(end, dtype=torch.uint8)
        if device.type == "cuda":
            pin(self._buffer)
        for key, value in values.items():
            self._view(self._buffer, key).copy_(value)
        self.remove()

    def load(self) -> None:
        loaded = self._buffer.to(self._device, non_blocking=True)
        self._fill({key: self._view(loaded, key) for key in self._forms})

    def remove(self) -> None:
        """Leave placeholders on the CPU; frozen values never change, so nothing is copied."""
        if self._device.type == "cpu":
            self._fill({key: _placeholder(form) for key, form in self._forms.items()})
        else:
            # On another device than the inputs: a pass over them raises.
            self._fill({key: self._view(self._buffer, key) for key in self._forms})

    def _fill(self, values: Mapping["_Key", Tensor]) -> None:
        for owner, name, key in self._slots:
            setattr(owner, name, values[key])

    def _view(self, buffer: Tensor, key: "_Key") -> Tensor:
        form, start = self._forms[key], self._starts[key]
        return buffer[start : start + form.nbytes].view(form.dtype).as_strided(form.shape, form.stride())


_CPU_ALIGNMENT = 64
"""Bytes; torch allocates CPU memory at multiples of it."""


def pin(buffer: Tensor) -> None:
    """Pin CPU memory that is there: memory that torch allocates pinned is rounded up to a power of two.

    Its pages have to be its own, as those of large tensors are.
    """
    address = buffer.data_ptr()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0))
    weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, address)


def _placeholder(form: Tensor) -> Tensor:
    """Return NaN without memory: whatever is computed with it is not finite, which no stage accepts."""
    return torch.full((), float("nan") if form.is_floating_point() else 0, dtype=form.dtype).expand(form.shape)


@dataclass(frozen=True)
class Moved:
    """The bytes that were moved to the device, and the seconds that it took; nothing is moved back."""

    bytes: int = 0
    seconds: float = 0.0


class ComponentOffload:
    """The components of a pipeline, of which only those in use have their frozen weights on the device.

    Trained parameters stay on the device, with their gradients and copies. `present` names what is there.
    """

    def __init__(self, components: Mapping[str, nn.Module], device: torch.device) -> None:
        """Move all components, which share no weights, off the device; InputError if the CPU has no room."""
        self.device, self.enabled = device, bool(components)
        self.present: set[str] = set()
        self._parked, self._in_use, self._moved = dict[str, _Parked](), list[frozenset[str]](), Moved()
        for name, component in components.items():
            for parameter in (each for each in component.parameters() if each.requires_grad):
                parameter.data = parameter.data.to(device)
            self._parked[name] = _Parked(name, component, device)

    @contextmanager
    def using(self, *names: str, evict: bool = True) -> Iterator[None]:
        """Have these components on the device inside the context, and no others but those of enclosing contexts.

        Unknown names are passed over. Without `evict` others stay until a component has to be brought to the device.
        """
        if not self.enabled:
            yield
            return
        self._in_use.append(frozenset(names) & self._parked.keys())
        try:
            self._move(evict=evict and len(self._in_use) == 1)
            yield
        finally:
            self._in_use.pop()

    def take_moved(self) -> Moved:
        """Return what was moved since the last call."""
        moved, self._moved = self._moved, Moved()
        return moved

    def _move(self, *, evict: bool) -> None:
        needed = frozenset[str]().union(*self._in_use)
        if needed == self.present or (needed <= self.present and not evict):
            return
        begun, loaded = time.perf_counter(), needed - self.present
        for name in sorted(self.present - needed):
            self._parked[name].remove()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name in sorted(loaded):
            self._parked[name].load()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.present = set(needed)
        count = sum(self._parked[name].nbytes for name in loaded)
        self._moved = Moved(self._moved.bytes + count, self._moved.seconds + time.perf_counter() - begun)


def refuse_too_little_room(components: Mapping[str, int]) -> None:
    """Raise InputError if weights, in bytes by component, are more than the CPU's memory has room for."""
    needed, room = sum(components.values()), psutil.virtual_memory().available
    if needed > room:
        text = f"{', '.join(components)}: {needed / GIB:.3g} GiB do not fit into the CPU's memory"
        hint = f"{text}, where {room / GIB:.3g} are free. Free some memory, quantize the base, or use none."
        raise InputError(PLACE, "components", hint)


_Key = tuple[int, torch.Size, torch.dtype]


def _key(values: Tensor) -> _Key:
    return values.data_ptr(), values.shape, values.dtype


def _frozen_slots(component: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield what holds frozen values, parameters, buffers and scales of quantized layers, and by which attribute."""
    for module in component.modules():
        yield from ((each, "data") for each in module.parameters(recurse=False) if not each.requires_grad)
        # The buffer itself: one that was loaded as a view would keep the whole file mapped by its base.
        yield from ((module, name) for name, _ in module.named_buffers(recurse=False, remove_duplicate=False))
        if is_quantized(module):
            state = getattr(module.weight, "quant_state", None)
            for scales in (state, getattr(state, "state2", None)):
                found = {} if scales is None else vars(scales)
                yield from ((scales, name) for name in _IN_4_BITS if isinstance(found.get(name), Tensor))


_IN_4_BITS = ("absmax", "code", "offset")
"""Tensors of bitsandbytes' QuantState, which its own method `to` moves."""

NO_OFFLOAD = ComponentOffload({}, torch.device("cpu"))
"""Moves nothing."""


def offload_parts(pipeline: Any, names: Collection[str], device: torch.device) -> ComponentOffload:
    """Move these parts of a pipeline of diffusers off the device, or raise InputError; without names nothing moves."""
    return ComponentOffload({name: getattr(pipeline, name) for name in names}, device) if names else NO_OFFLOAD
