"""Where a reward's model computes, and in which precision."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from grpo_core.errors import InputError

_ON_CUDA = threading.Lock()


def check_device_setting(place: str, value: object) -> None:
    """Refuse what is none of ``cpu``, ``cuda``, ``cuda:N``.

    Raises:
        InputError: it is not.
    """
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(value)):
        raise InputError(place, value, "Set one of cpu, cuda, cuda:N.")


def find_device_problem(place: str, device: str) -> InputError | None:
    """What is wrong with a device on this machine; None where nothing is."""
    if not device.startswith("cuda"):
        return None
    seen, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index < seen:
        return None
    return InputError(place, device, f"PyTorch sees {seen} CUDA device(s); set cpu.")


@contextmanager
def exact_inference(device: str) -> Iterator[None]:
    """Without gradients, deterministic, and in the precision of the tensors themselves.

    One thread at a time on CUDA.
    """
    kind = torch.device(device).type
    # Flat patches have features near zero, which half precision divides into NaN; TF32 keeps 10 bits only.
    with torch.inference_mode(), torch.autocast(kind, enabled=False):
        if kind != "cuda":
            yield
            return
        # These switches belong to the process: a thread that ends would switch TF32 on under another.
        with (
            _ON_CUDA,
            cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            _exact_products(),
        ):
            yield


@contextmanager
def _exact_products() -> Iterator[None]:
    """Without TF32 in cuBLAS's matrix products, which cuDNN's switch leaves alone."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
