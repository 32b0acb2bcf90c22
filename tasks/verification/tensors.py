"""Tensors of two artifacts: states of denoising steps, weights and their copies, states of optimizers."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from tasks.runs.layout import STATES
from tasks.verification.records import Difference
from tasks.verification.tables import Follows
from tasks.verification.values import FLOAT32_DIGITS, Side, Tally, UnreadableError

_AT_ONCE = 2**22  # entries of a tensor
_IN_16_BITS: Mapping[torch.dtype, float] = MappingProxyType({torch.float16: 64.0, torch.bfloat16: 512.0})
"""Allowance for states that are rounded to 16 bits: with the default tolerance two of their units in the last place."""

_OF_WEIGHTS = 256.0
"""Allowance for weights and moments: with the default tolerance 0.8 % of the update. Adam divides a gradient by its own
size, so that of one that is almost zero the rounding decides the step."""

RELATIVE_UNIT = 2.0 ** (1 - FLOAT32_DIGITS)
"""What distances of weights and of optimizers are counted in, as shares of what the update changed: 2^-23."""


class Tensors:
    """The tensors in several safetensors files by their names, read one by one."""

    def __init__(self, side: Side) -> None:
        self.side, self._stack = side, contextlib.ExitStack()
        self.files: dict[str, Path] = {}
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> "Tensors":
        with self.side.reading():
            for path in self.side.files:
                file = self._stack.enter_context(safe_open(path, "pt"))
                for name in file.keys():  # noqa: SIM118  (not iterable by itself)
                    self.files[name], self._opened[name] = path, file
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; None if there is none of this name."""
        if name not in self._opened:
            return None
        with self.side.reading():
            tensor: Tensor = self._opened[name].get_tensor(name)
            return tensor


def compare_states(stored: Side, computed: Side, follows: Follows) -> Iterator[Difference]:
    """Yield the differences of the states of samples; not of those whose tokens differ."""
    try:
        with Tensors(stored) as theirs, Tensors(computed) as ours:
            names = sorted((theirs.files.keys() | ours.files.keys()) - follows.keys())
            single = [name for name in names if name not in theirs.files or name not in ours.files]
            if single:
                said = ["no states" if single[0] not in each.files else "states" for each in (theirs, ours)]
                yield Difference(
                    place=f"{STATES}, rows",
                    sample_id=single[0],
                    stored=said[0],
                    computed=said[1],
                    count=len(single),
                    total=len(names),
                )
            tally = Tally(STATES)
            for name in names:
                if name not in single:
                    _compare_tensor(tally, name, theirs.get(name), ours.get(name))
            if (found := tally.difference()) is not None:
                yield found
    except UnreadableError as error:
        yield error.difference(STATES)


class _Norms:
    """Squares of distances and of changes, summed over tensors of one kind."""

    def __init__(self) -> None:
        self.apart = self.changed = 0.0

    def add(self, apart: Tensor, changed: Tensor) -> None:
        with np.errstate(over="ignore"):
            self.apart += float(apart.square().sum())
            self.changed += float(changed.square().sum())

    def share(self, fallback: float | None) -> float:
        """Return the distance in units of RELATIVE_UNIT of the change, or of the `fallback`."""
        changed = math.sqrt(self.changed) if fallback is None else fallback
        apart = math.sqrt(self.apart) if math.isfinite(self.apart) else math.inf
        if apart == 0.0:
            return 0.0
        return apart / changed / RELATIVE_UNIT if changed > 0.0 and math.isfinite(changed) else math.inf


def compare_tensors(
    place: str,
    stored: Side,
    computed: Side,
    previous: Side,
    *,
    kind_of: Callable[[str], str] = lambda name: "",
    change: float | None = None,
) -> Difference | None:
    """Return the difference of all tensors in these files, with the first by name; `largest` as a share of a change.

    Args:
        place: the folder of the files in the artifact.
        previous: those of the version before the update; without files the change is from zero.
        kind_of: kind of a tensor by its name; the largest share of a kind counts, since kinds differ in scale.
        change: norm of the change in place of that from `previous`.
    """
    tally = Tally(place, allowance=_OF_WEIGHTS)
    norms: dict[str, _Norms] = {}
    try:
        with Tensors(stored) as theirs, Tensors(computed) as ours, Tensors(previous) as earlier:
            for name in sorted(theirs.files.keys() | ours.files.keys()):
                before = tally.count
                sides = theirs.get(name), ours.get(name)
                norm = norms.setdefault(kind_of(name), _Norms())
                _compare_tensor(tally, None, *sides, norm=norm, previous=earlier.get(name))
                if tally.count > before == 0:
                    file = (ours if name in ours.files else theirs).files[name]
                    tally.place = f"{place}/{file.name}, {name}"
    except UnreadableError as error:
        return error.difference(place)
    found = tally.difference()
    if found is None:
        return None
    largest = max(norm.share(change) for norm in norms.values()) if math.isfinite(tally.distance) else math.inf
    return found.model_copy(update={"largest": largest})


def _compare_tensor(
    tally: Tally,
    sample_id: str | None,
    stored: Tensor | None,
    computed: Tensor | None,
    *,
    norm: _Norms | None = None,
    previous: Tensor | None = None,
) -> None:
    if stored is None or computed is None or (stored.shape, stored.dtype) != (computed.shape, computed.dtype):
        tally.add_uneven(1)
        tally.note(sample_id, None, *map(_described, (stored, computed)))
        return
    tally.allowance = max(tally.allowance, _IN_16_BITS.get(computed.dtype, 1.0))
    if previous is not None and previous.shape != computed.shape:
        previous = None
    flat = [None if each is None else each.reshape(-1) for each in (stored, computed, previous)]
    for begin in range(0, computed.numel(), _AT_ONCE):
        theirs, ours, earlier = (each if each is None else each[begin : begin + _AT_ONCE].double() for each in flat)
        assert theirs is not None, "both sides have the tensor"
        assert ours is not None, "both sides have the tensor"
        differ = tally.add(theirs.numpy(), ours.numpy())
        if norm is not None:
            norm.add(ours - theirs, ours if earlier is None else ours - earlier)
        if differ.any():
            first = int(np.flatnonzero(differ)[0])
            index = [int(each) for each in np.unravel_index(begin + first, computed.shape)]
            values = [_shown(each.reshape(-1)[begin + first]) for each in (stored, computed)]
            tally.note(sample_id, str(index), *values)


def _described(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def _shown(value: Tensor) -> str:
    return str(value.numpy()) if value.dtype == torch.float32 else repr(value.item())


def norm_of(side: Side, wanted: Callable[[str], bool]) -> tuple[float, int]:
    """Return the norm of the tensors of these names, and how many entries all tensors of the files have."""
    squares, entries = 0.0, 0
    with Tensors(side) as tensors:
        for name in tensors.files:
            tensor = tensors.get(name)
            assert tensor is not None, "its name is that of one"
            entries += tensor.numel()
            if wanted(name):
                squares += sum(float(part.double().square().sum()) for part in tensor.reshape(-1).split(_AT_ONCE))
    return math.sqrt(squares), entries
