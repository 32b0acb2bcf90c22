"""The devices and threads of torch that a placement names."""

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from configs.placement import Device, PlacementSection
from grpo_core.errors import InputError


def set_threads(placement: PlacementSection) -> None:
    """Set torch's thread count, the only place that does."""
    torch.set_num_threads(placement.torch_threads)


def configure_torch(placement: PlacementSection) -> torch.device:
    """Set torch's threads and kernels and return the first device; InputError for a GPU that this machine lacks."""
    set_threads(placement)
    # It makes a plan for each shape, a tenth of a second, and each token that is sampled has another shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    refuse_missing_devices(placement.devices[:1])
    return torch_device(placement)


def torch_device(placement: PlacementSection) -> torch.device:
    """Return the first device that the placement names."""
    device = placement.devices[0]
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def describe_processor(placement: PlacementSection) -> str:
    """Describe what computes here, as far as it decides how results are rounded: a GPU, or the CPU and its threads."""
    if torch_device(placement).type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(torch_device(placement)))
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            name = found[1]
    threads = placement.torch_threads
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}"


def refuse_missing_devices(devices: Sequence[Device]) -> None:
    """Raise InputError for GPUs that PyTorch does not find here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [each for each in devices if (each == "cuda" and not gpus) or (isinstance(each, int) and each >= gpus)]
    if missing:
        found = f"finds {gpus} here, 0 to {gpus - 1}" if gpus else "finds no CUDA device here"
        hint = f"PyTorch {found}. Name GPUs that it finds, or set it to auto or cpu."
        raise InputError("placement.devices", missing[0] if len(missing) == 1 else missing, hint)
