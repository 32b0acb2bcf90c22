"""The most GPU memory that a stage takes, by PyTorch's own count of this process."""

import torch


def reset_peak_memory() -> None:
    """Begin to measure; of stages that run at the same time in one process, each may report what another took."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int | None:
    """Return the most bytes that were allocated on the current GPU since the reset; None if it was not used."""
    return torch.cuda.max_memory_allocated() or None if torch.cuda.is_initialized() else None
