"""16-bit arithmetic over the weights."""

import torch

from grpo_core.errors import InputError


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context that computes matrix products in `dtype`; parameters and gradients keep their dtype.

    Sampling and scoring have to use the same one, or their log-probs differ by rounding.

    Args:
        device: of the model.
        dtype: of the arithmetic; None: the weights' dtype.
    """
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def refuse_unscaled_float16(dtype: torch.dtype, autocast_dtype: torch.dtype | None) -> None:
    """Refuse training in float16: its smallest gradients are zero unless the loss is scaled, and no update scales it.

    Raises:
        InputError: weights or arithmetic are in float16.
    """
    hint = "Small gradients vanish in float16 without a scaled loss; use bfloat16 or float32."
    for place, found in (("policy.dtype", dtype), ("policy.autocast", autocast_dtype)):
        if found == torch.float16:
            raise InputError(place, "float16", hint)
