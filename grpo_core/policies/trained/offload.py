"""Frozen weights off the device while other components work: pinned in CPU memory, or in a file where there is no GPU.

A policy encloses its work in `ComponentOffload.using`. Components stay on the device after it, until another one is
needed there, so a stage that uses one component after the other moves each once. Values never change on the way: with
and without offload the results are equal to the bit.
"""

import hashlib
import mmap
import tempfile
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol

import psutil
import torch
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.quantization import is_quantized

PLACE = "policy.offload"
GIB = 1024**3


class _Host(Protocol):
    def load(self, device: torch.device) -> Tensor:
        """Return the values on the device."""

    def placeholder(self) -> Tensor:
        """Return what stands in the place of the values while they are off the device."""


@dataclass(frozen=True)
class _Pinned:
    """Values in CPU memory that is never paged out, from which a GPU copies at full speed."""

    values: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "_Pinned":
        pinned = torch.empty_like(values, device="cpu", pin_memory=True)
        return cls(pinned.copy_(values))

    def load(self, device: torch.device) -> Tensor:
        return self.values.to(device, non_blocking=True)

    def placeholder(self) -> Tensor:
        # On another device than the inputs: a pass over it raises.
        return self.values


@dataclass(frozen=True)
class _Stored:
    """Values in a file that has no name, so that it is gone with the process, however that ends."""

    file: IO[bytes]
    start: int
    sha256: str
    form: Tensor
    stand_in: Tensor
    misalignment: int

    @classmethod
    def of(cls, values: Tensor, file: IO[bytes]) -> "_Stored":
        start, content = file.seek(0, 2), _bytes(values.contiguous())
        file.write(content)
        file.flush()
        # NaN without memory: whatever is computed with it is not finite, which no stage accepts.
        stand_in = torch.full((), float("nan") if values.is_floating_point() else 0, dtype=values.dtype)
        form = torch.empty_like(values, device="meta")
        sha256 = hashlib.sha256(content).hexdigest()
        return cls(file, start, sha256, form, stand_in.expand(values.shape), values.data_ptr() % _ALIGNMENT)

    def load(self, device: torch.device) -> Tensor:
        # Matrix products on a CPU round differently over other addresses, and files are mapped to any.
        # What malloc gives to a thread goes back to it when it is free, not to the system.
        pages = mmap.mmap(-1, self.form.nbytes + self.misalignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)[self.misalignment :]
        values, content = memory.view(self.form.dtype).view(self.form.shape), memory.numpy().data
        self.file.seek(self.start)
        self.file.readinto(content)  # type: ignore[attr-defined]
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"weights that were written to a file in {tempfile.gettempdir()} came back changed")
        if self.form.is_contiguous():
            return values
        return torch.empty_like(self.form, device=device).copy_(values)

    def placeholder(self) -> Tensor:
        return self.stand_in


_ALIGNMENT = 64
"""Bytes; torch allocates at multiples of it."""


def _bytes(values: Tensor) -> Any:
    """Return the memory of contiguous values as a writable buffer."""
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Slot:
    """A tensor of a module, and the attribute that it is replaced by."""

    owner: Any
    name: str

    @property
    def value(self) -> Tensor:
        value: Tensor = getattr(self.owner, self.name)
        return value


@dataclass(frozen=True)
class Moved:
    """What was moved between the device and its host.

    Attributes:
        bytes: in both directions. Frozen weights are written to the host once, and then only read.
        seconds: that it took.
    """

    bytes: int = 0
    seconds: float = 0.0


class ComponentOffload:
    """The components of a pipeline, of which only those in use have their frozen weights on the device.

    Trained parameters stay on the device, with their gradients and copies.

    Attributes:
        device: where components compute.
        enabled: whether components are moved at all.
        present: names of those that are on the device.
    """

    def __init__(self, components: Mapping[str, nn.Module], device: torch.device) -> None:
        """Move all components off the device.

        Args:
            components: on any device, by the name of their part of the pipeline, without weights that two of them
                share; empty: nothing is ever moved.

        Raises:
            InputError: CPU memory, or the disk, is too small for them.
        """
        self.device, self.enabled = device, bool(components)
        self.present: set[str] = set()
        self._components, self._in_use, self._moved = dict(components), list[frozenset[str]](), Moved()
        self._file: IO[bytes] | None = None
        # By what stands in a component's slots, which is kept here so that nothing else gets its address.
        self._hosts: dict[str, dict[_Key, tuple[_Host, Tensor]]] = {}
        if components and device.type == "cpu":
            self._file = tempfile.TemporaryFile(prefix="grpo-offload-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        for name, component in components.items():
            for parameter in (each for each in component.parameters() if each.requires_grad):
                parameter.data = parameter.data.to(device)
            self._remove(name)

    @contextmanager
    def using(self, *names: str, evict: bool = True) -> Iterator[None]:
        """Have these components on the device inside the context, and no others but those of enclosing contexts.

        Args:
            names: of components; unknown ones are passed over.
            evict: false leaves the others where they are, until a component has to be brought to the device.
        """
        if not self.enabled:
            yield
            return
        self._in_use.append(frozenset(names) & self._components.keys())
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
        begun = time.perf_counter()
        count = sum(self._remove(name) for name in sorted(self.present - needed))
        count += sum(self._load(name) for name in sorted(needed - self.present))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._moved = Moved(self._moved.bytes + count, self._moved.seconds + time.perf_counter() - begun)

    def _remove(self, name: str) -> int:
        """Replace a component's weights by what stands for them; return the bytes that were written for it."""
        slots = _distinct(_frozen_slots(self._components[name]))
        known = self._hosts.get(name, {})
        sizes = {_key(slot.value): slot.value.nbytes for slot in slots}
        written = sum(count for key, count in sizes.items() if key not in known)
        refuse_too_little_room({name: written}, self.device)
        hosts: dict[_Key, _Host] = {}
        for slot in slots:
            # Two slots may have one tensor.
            key = _key(slot.value)
            if key not in hosts:
                hosts[key] = known[key][0] if key in known else self._host(slot.value)
            setattr(slot.owner, slot.name, hosts[key].placeholder())
        self._hosts[name] = {_key(host.placeholder()): (host, host.placeholder()) for host in hosts.values()}
        self.present.discard(name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return written

    def _load(self, name: str) -> int:
        """Bring a component's weights to the device; return their bytes."""
        known, loaded = self._hosts[name], dict[_Key, Tensor]()
        for slot in _distinct(_frozen_slots(self._components[name])):
            key = _key(slot.value)
            if key not in loaded:
                loaded[key] = known[key][0].load(self.device)
            setattr(slot.owner, slot.name, loaded[key])
        self._hosts[name] = {_key(values): (known[key][0], values) for key, values in loaded.items()}
        self.present.add(name)
        return sum(values.nbytes for values in loaded.values())

    def _host(self, values: Tensor) -> _Host:
        return _Pinned.of(values) if self._file is None else _Stored.of(values, self._file)


def refuse_too_little_room(components: Mapping[str, int], device: torch.device) -> None:
    """Refuse weights that have no room off the device.

    Args:
        components: bytes of the weights by component.
        device: where they compute. Those of a GPU are kept in CPU memory, others in the folder of temporary files.

    Raises:
        InputError: they are more than there is.
    """
    needed = sum(components.values())
    if device.type == "cpu":
        room, where = psutil.disk_usage(tempfile.gettempdir()).free, f"the disk of {tempfile.gettempdir()}"
        hint = "Free some space, let the variable TMPDIR name a folder on a larger disk"
    else:
        room, where, hint = psutil.virtual_memory().available, "the CPU's memory", "Free some memory, quantize the base"
    if needed > room:
        names = ", ".join(components)
        text = f"{names}: {needed / GIB:.3g} GiB do not fit into {where}, where {room / GIB:.3g} are free"
        raise InputError(PLACE, "components", f"{text}. {hint}, or use none.")


_Key = tuple[int, torch.Size, torch.dtype]


def _key(values: Tensor) -> _Key:
    return values.data_ptr(), values.shape, values.dtype


def _distinct(slots: Iterable[_Slot]) -> list[_Slot]:
    """Leave out repetitions: modules share parameters, and layers their scales."""
    return list({(id(slot.owner), slot.name): slot for slot in slots}.values())


def _frozen_slots(component: nn.Module) -> Iterator[_Slot]:
    """Yield what holds the frozen values of a component: parameters, buffers, and the scales of quantized layers."""
    for module in component.modules():
        for parameter in module.parameters(recurse=False):
            yield from _movable(_Slot(parameter, "data")) if not parameter.requires_grad else ()
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            # The buffer itself: one that was loaded as a view would keep the whole file mapped by its base.
            yield from _movable(_Slot(module, name))
        if is_quantized(module):
            yield from _scales(module)


def _movable(slot: _Slot) -> Iterator[_Slot]:
    if slot.value.numel() and not slot.value.is_meta:
        yield slot


def _scales(layer: Any) -> Iterator[_Slot]:
    """Yield the tensors of a layer of bitsandbytes that are neither its parameters nor its buffers."""
    state = getattr(layer.weight, "quant_state", None)
    owners = [layer.weight, getattr(layer, "state", None), state, getattr(state, "state2", None)]
    for owner, names in zip(owners, (("CB", "SCB"), ("CB", "SCB"), _IN_4_BITS, _IN_4_BITS), strict=True):
        for name in names:
            if owner is not None and isinstance(vars(owner).get(name), Tensor):
                yield from _movable(_Slot(owner, name))


_IN_4_BITS = ("absmax", "code", "offset")
"""Tensors of bitsandbytes' QuantState, which its own method `to` moves."""

NO_OFFLOAD = ComponentOffload({}, torch.device("cpu"))
"""Moves nothing."""


def offload_parts(pipeline: Any, names: Collection[str], device: torch.device) -> ComponentOffload:
    """Move these parts of a pipeline of diffusers off the device; without names nothing is ever moved.

    Raises:
        InputError: CPU memory, or the disk, is too small for them.
    """
    return ComponentOffload({name: getattr(pipeline, name) for name in names}, device) if names else NO_OFFLOAD
