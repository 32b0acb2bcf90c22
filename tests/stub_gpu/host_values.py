"""Values for a device that computes nothing, and the lines of code that make the host wait for it.

Kernels of the stub leave no values, so what the host reads has to come from somewhere: operations are computed a second
time on the CPU, in memory that mirrors the device's by address. A small model is computed in full, and really trains.
Of a released one only small tensors that follow from the host's are (ids, masks, positions, timesteps); every other
number is taken for 0, and comparisons of them are computed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.stub_gpu import stub

aten = torch.ops.aten
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_OURS = tuple(f"{_ROOT}{layer}/" for layer in ("grpo_core", "tasks", "flows"))
_LIBRARIES = ("/transformers/", "/diffusers/", "/peft/", "/torch/optim/", "/torch/nn/utils/")
_SMALL_BYTES, _SMALL = 1 << 20, 65536
_MAKES_VALUES = frozenset({"arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor"})
_RANDOM = ("rand", "normal", "bernoulli", "uniform", "empty", "multinomial", "dropout", "exponential", "attention")
_SIZED_BY_VALUES = frozenset(
    {
        aten.nonzero.default,
        aten._unique2.default,
        aten.masked_select.default,
        aten.unique_consecutive.default,
        aten.bincount.default,
        aten.argwhere.default,
        aten.repeat_interleave.Tensor,
    }
)
_INDEXING = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
    }
)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SET_STORAGE = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)

_Call = tuple[Any, Any, Mapping[str, Any], Any]

Site = tuple[str, str]
"""What happens ("wait: item"), in which function of which file; a line of it is in `HostValues.lines`."""


class HostValues(TorchDispatchMode):
    """Computes beside the stub what the host may read.

    Attributes:
        sites: how often the host waited, or copied from pageable memory, by place.
        lines: the last line at which it did.
        operations: how often each was called on the device.
        exact_products: products of two matrices in fp32 among them.
        failed: operations that the CPU could not compute.
    """

    def __init__(self, *, everything: bool) -> None:
        super().__init__()
        self.everything = everything
        self.sites, self.operations, self.failed = Counter[Site](), Counter[str](), Counter[str]()
        self.exact_products = 0
        self._capturing: list[_Call] | None = None
        self.lines: dict[Site, str] = {}
        self._mirror: dict[int, torch.UntypedStorage] = {}
        self._special: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.lift_fresh.default: self._lift,
            aten.equal.default: self._compared,
            aten.allclose.default: self._compared,
            aten.convolution.default: self._convolution,
            aten.convolution_backward.default: self._convolution_backward,
            aten._to_copy.default: self._copy,
            aten.copy_.default: self._copy,
            aten._scaled_dot_product_cudnn_attention.default: self._cudnn_attention,
            **dict.fromkeys(_SIZED_BY_VALUES, self._sized_by_values),
            **dict.fromkeys(_INDEXING, self._index),
            # The tensor is seen through its new storage.
            **dict.fromkeys(_SET_STORAGE, lambda func, args, kwargs: func(*args, **kwargs)),
        }

    def reset(self) -> None:
        """Count from zero."""
        for counter in (self.sites, self.operations):
            counter.clear()
        stub.reset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if of_shapes_alone():
            return func(*args, **kwargs)
        if not {*types} <= {Tensor, Parameter}:
            return NotImplemented  # a share of a tensor, which comes again as this process's own part
        special = self._special.get(func)
        if any(each.is_cuda for each in tensors_in((*args, *kwargs.values()))):
            self.operations[func._schema.name] += 1
            self.exact_products += func in _PRODUCTS and args[-1].dtype == torch.float32
            if special is not None:
                return special(func, args, kwargs)
        elif special == self._copy:
            return special(func, args, kwargs)
        return self._plain(func, args, kwargs)

    # ---- CUDA graphs: what is captured is computed at each replay

    def __enter__(self) -> Self:
        graphs: Any = torch.cuda.CUDAGraph
        self._of_torch = graphs.capture_begin, graphs.capture_end, graphs.replay
        graphs.capture_begin, graphs.capture_end, graphs.replay = (
            lambda graph, *args, **given: self._begin_capture(graph, *args, **given),
            lambda graph: self._end_capture(graph),
            lambda graph: self._replay(graph),
        )
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *args: Any) -> None:
        graphs: Any = torch.cuda.CUDAGraph
        graphs.capture_begin, graphs.capture_end, graphs.replay = self._of_torch
        super().__exit__(*args)

    def _begin_capture(self, graph: Any, *args: Any, **given: Any) -> None:
        self._of_torch[0](graph, *args, **given)
        self._capturing = graph.calls = []

    def _end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        self._capturing = None
        self._of_torch[1](graph)

    def _replay(self, graph: Any) -> None:
        self._of_torch[2](graph)
        for call in graph.calls:
            self._mirrored(*call)

    # ---- the mirror

    def _seen(self, tensor: Tensor) -> Tensor | None:
        """Return the CPU's view of a tensor, None if its values are unknown."""
        if not tensor.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        mirror = self._mirror.get(storage.data_ptr())
        if self.everything and (mirror is None or mirror.nbytes() < storage.nbytes()):
            mirror = torch.UntypedStorage(storage.nbytes())
            if storage.nbytes():
                self._mirror[storage.data_ptr()] = mirror
        return None if mirror is None else _view(tensor, mirror)

    def _keep(self, tensor: Tensor, value: Tensor | None) -> None:
        storage = tensor.untyped_storage()
        too_large = storage.nbytes() > _SMALL_BYTES or (tensor.is_floating_point() and tensor.numel() > _SMALL)
        if value is None or not storage.nbytes() or (too_large and not self.everything):
            self._mirror.pop(storage.data_ptr(), None)
            return
        self._mirror[storage.data_ptr()] = mirror = torch.UntypedStorage(storage.nbytes())
        _view(tensor, mirror).copy_(value)

    def _read(self, tensor: Tensor) -> Tensor:
        value = self._seen(tensor)
        if value is not None:
            return value.clone()
        if tensor.numel() <= _SMALL:
            return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)
        unknown = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.dtype == torch.bool:
            # Of as many ids few are not cut.
            unknown.view(-1)[0] = True
        return unknown

    def _placed(self, value: Tensor) -> Tensor:
        made = torch.empty(value.shape, dtype=value.dtype, device="cuda")
        self._keep(made, value)
        return made

    def _on_cpu(self, given: Any, look: Callable[[Tensor], Tensor | None]) -> Any:
        if isinstance(given, Tensor):
            return look(given)
        if isinstance(given, list | tuple):
            return [self._on_cpu(each, look) for each in given]
        if isinstance(given, dict):
            return {name: self._on_cpu(each, look) for name, each in given.items()}
        return torch.device("cpu") if isinstance(given, torch.device) else given

    def _plain(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self._capturing is None:
            self._mirrored(func, args, kwargs, result)
        else:
            self._capturing.append((func, args, kwargs, result))
        return result

    def _mirrored(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = tensors_in((*args, *kwargs.values())), tensors_in((result,))
        changes = func._schema.is_mutable
        on_device = [each for each in (given if changes else made) if each.is_cuda]
        if not on_device:
            return
        places = {each.untyped_storage().data_ptr() for each in given if each.is_cuda}
        if not changes and all(each.untyped_storage().data_ptr() in places for each in on_device):
            return  # a view, whose values are seen through its storage
        values = self._computed(func, args, kwargs, given, made)
        if not changes:
            for each, value in zip(made, values or [None] * len(made), strict=True):
                if each.is_cuda:
                    self._keep(each, value)
        elif values is None:
            for each in made or on_device:
                self._mirror.pop(each.untyped_storage().data_ptr(), None)

    def _computed(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Compute an operation on the CPU, which changes what it changes there; None if values are unknown."""
        look = self._seen
        if not self.everything:
            name = func._schema.name.removeprefix("aten::")
            if any(word in name for word in _RANDOM) or not (given or name in _MAKES_VALUES):
                return None
            if any(each.untyped_storage().nbytes() > _SMALL_BYTES for each in made):
                return None
            if any(each.is_cuda and each.untyped_storage().data_ptr() not in self._mirror for each in given):
                compared = all(each.dtype == torch.bool for each in made) and not func._schema.is_mutable
                if not compared or any(each.numel() > _SMALL for each in (*given, *made)):
                    return None
                look = self._read
        args, kwargs = self._on_cpu(args, look), self._on_cpu(kwargs, look)
        try:
            return tensors_in((func(*args, **kwargs),))
        except (RuntimeError, NotImplementedError) as error:
            self.failed[f"{func}: {error}"] += 1
            return None

    # ---- what the host reads

    def _count(self, what: str) -> None:
        """Count this at the function of the project that is running, named with the library that it called."""
        frame, library, here = sys._getframe(1), "", None
        while frame is not None:
            name = frame.f_code.co_filename
            # Whoever sends several at once is named.
            if name.startswith(_OURS) and not name.endswith("grpo_core/transfers.py"):
                here = frame
                break
            if not library and any(each in name for each in _LIBRARIES):
                library = f" through {name.split('site-packages/')[-1]} {frame.f_code.co_qualname}"
            frame = frame.f_back  # type: ignore[assignment]
        file, function = ("", "backward") if here is None else (here.f_code.co_filename, here.f_code.co_qualname)
        site = (what, f"{file.removeprefix(_ROOT)} {function}{library}")
        self.sites[site] += 1
        self.lines[site] = "" if here is None else f"{file.removeprefix(_ROOT)}:{here.f_lineno}"

    def _item(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._count("wait: item")
        func(*args)
        return self._read(args[0]).item()

    def _lift(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._count("copy: torch.tensor")
        self._keep(args[0], stub.last_sent(args[0]))
        return func(*args)

    def _compared(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether tensors are alike, as those of unknown values are taken to be."""
        self._count(f"wait: {func._schema.name.removeprefix('aten::')}")
        func(*args, **kwargs)
        values = [self._seen(each) for each in tensors_in(args)]
        return any(each is None for each in values) or func(*self._on_cpu(args, self._seen), **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = self._plain(func, args, kwargs)
        source, target = (args[0], result) if func is aten._to_copy.default else (args[1], args[0])
        if source.is_cuda and not target.is_cuda:
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self._count("wait: copy to the CPU")
            # Of larger ones nobody touches the pages.
            if target.untyped_storage().nbytes() < 64 * _SMALL_BYTES:
                target.copy_(self._read(source))
        elif target.is_cuda and not source.is_cuda and source.numel() > 1 and not source.is_pinned():
            self._count("copy: from pageable memory")
        return result

    def _sized_by_values(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("output_size") is not None:
            return self._plain(func, args, kwargs)
        self._count(f"wait: {func._schema.name.removeprefix('aten::')}")
        func(*args, **kwargs)  # its launches, and its wait
        args, kwargs = tree_map_only(Tensor, self._read, (args, kwargs))
        return tree_map_only(Tensor, self._placed, func(*args, **kwargs))

    def _index(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Put the places of a mask for it, as the operation itself does by a wait."""
        places: list[Tensor | None] = []
        for each in args[1]:
            if each is None or each.dtype not in (torch.bool, torch.uint8):
                places.append(each)
                if each is not None and not each.is_cuda and args[0].is_cuda:
                    self._count("copy: index on the CPU")
                continue
            self._count("wait: index by a mask")
            aten.nonzero.default(each)
            places += map(self._placed, self._read(each).nonzero().unbind(1))
        return self._plain(func, (args[0], places, *args[2:]), kwargs)

    # ---- what the stub does not have: cuDNN

    def _values(self, func: Any, args: Any, kwargs: Mapping[str, Any], count: int) -> Sequence[Tensor | None]:
        if not self.everything:
            return [None] * count
        result = func(*self._on_cpu(args, self._seen), **self._on_cpu(kwargs, self._seen))
        return result if isinstance(result, tuple) else [result]

    def _convolution(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        stub.count_launches(1)
        shape = func(*tree_map_only(Tensor, lambda each: each.to("meta"), args), **kwargs).shape
        made = torch.empty(shape, dtype=args[0].dtype, device="cuda")
        self._keep(made, *self._values(func, args, kwargs, 1))
        return made

    def _convolution_backward(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        stub.count_launches(2)
        gradient, *inputs = args[:3]
        bias = torch.empty(gradient.shape[1], dtype=gradient.dtype, device="cuda")
        like = (*(torch.empty_like(each) for each in inputs), bias)
        made = tuple(each if wanted else None for each, wanted in zip(like, args[-1], strict=True))
        for each, value in zip(made, self._values(func, args, kwargs, 3), strict=True):
            if each is not None:
                self._keep(each, value)
        return made

    def _cudnn_attention(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._count("attention of cuDNN")
        query, _, value = args[:3]
        out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device="cuda")
        sums = torch.empty(*query.shape[:-1], 1, dtype=torch.float32, device="cuda")
        seed = torch.empty((), dtype=torch.long)
        return out, sums, None, None, query.shape[-2], args[1].shape[-2], seed, seed, None


def of_shapes_alone() -> bool:
    """Return whether operations are asked for the shapes of their results, as to find how these are sharded."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def tensors_in(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, which are in lists at most."""
    found = []
    for each in given:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += [one for one in each if isinstance(one, Tensor)]
    return found


def _view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    own = torch.empty(0, dtype=tensor.dtype)
    return own.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]
