"""Images as fp32 tensors in [0, 1]."""

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image
from torch import Tensor


def to_tensor(image: Image.Image) -> Float32[Tensor, "1 3 height width"]:
    """Convert an 8-bit RGB image to fp32 in [0, 1], exactly level / 255.

    Raises:
        ValueError: another mode than RGB; :func:`to_rgb` converts.
    """
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, got mode {image.mode}")
    levels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return levels.permute(2, 0, 1).unsqueeze(0).contiguous().float() / 255.0


def check_pair(images: Tensor, targets: Tensor) -> None:
    """Refuse tensors that a similarity measure would score wrongly without an error.

    uint8 levels look nearly alike to LPIPS, one channel and a single target broadcast, half precision gives NaN.

    Raises:
        ValueError: not fp32 of shape [N, 3, H, W], two shapes, or levels outside [0, 1].
    """
    for tensor in (images, targets):
        if tensor.dtype != torch.float32 or tensor.ndim != 4 or tensor.shape[1] != 3:
            raise ValueError(f"expected fp32 [N, 3, H, W], got {tensor.dtype} {list(tensor.shape)}")
        # Negated, so that NaN is refused with the rest.
        if not bool(((tensor >= 0) & (tensor <= 1)).all()):
            raise ValueError(f"expected levels in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
    if images.shape != targets.shape:
        raise ValueError(f"expected one shape, got {list(images.shape)} and {list(targets.shape)}")
