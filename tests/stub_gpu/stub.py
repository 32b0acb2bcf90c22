"""The Python side of the stub GPU: what it counts, and what was sent to it."""

import ctypes
import sys

import torch
from torch import Tensor

_NAMES = ("launches", "products", "waits", "pageable_copies", "graphs", "device_bytes", "device_peak")


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in _NAMES]


_library = ctypes.CDLL(None)
if not hasattr(_library, "stub_counts"):
    sys.exit("start this program with the variables that python -m tests.stub_gpu.build prints")
_library.stub_counts.restype = ctypes.POINTER(_Counts)


def counts() -> dict[str, int]:
    """Return launches of kernels, products of cuBLAS, waits of the host, copies from or to pageable memory, bytes."""
    found = _library.stub_counts().contents
    return {name: getattr(found, name) for name in _NAMES}


def count_launches(number: int) -> None:
    """Count the kernels of a library that the stub does not have."""
    _library.stub_counts().contents.launches += number


def reset() -> None:
    """Count from zero; what is allocated stays."""
    _library.stub_reset()
    torch.cuda.reset_peak_memory_stats()


def last_sent(tensor: Tensor) -> Tensor | None:
    """Return what was last copied from the host to a tensor's address, if it was small and of this size."""
    value = torch.empty(tensor.shape, dtype=tensor.dtype)
    address, size, to = ctypes.c_ulonglong(tensor.data_ptr()), ctypes.c_size_t(value.nbytes), value.data_ptr()
    return value if value.nbytes and _library.stub_sent(address, size, ctypes.c_void_p(to)) else None
