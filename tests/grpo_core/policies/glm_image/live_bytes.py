"""Oracles for memory: what autograd keeps, and the most bytes alive at once, seen by watching real operations."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operations under it make, until each is freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.alive += size
                weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self.alive)
        return output


@contextmanager
def saved_storages(besides: list[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps for backward, those of `besides` left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # a freed storage's address would be given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
