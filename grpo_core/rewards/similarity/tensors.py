"""Images as fp32 tensors in [0, 1], and how alike two are, pixel by pixel: MSE, PSNR, R², SSIM.

SSIM: Wang, Bovik, Sheikh and Simoncelli, 2004, "Image Quality Assessment: From Error Visibility to Structural
Similarity", equation 13 with the constants of section III.B.
"""

import numpy as np
import pytorch_msssim
import torch
from jaxtyping import Float32, Float64
from PIL import Image
from torch import Tensor

from grpo_core.rollouts.images import WINDOW


def to_tensor(image: Image.Image) -> Float32[Tensor, "1 3 height width"]:
    """Convert an 8-bit RGB image to fp32 in [0, 1], exactly level / 255; ValueError for another mode."""
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, got mode {image.mode}")
    levels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return levels.permute(2, 0, 1).unsqueeze(0).contiguous().float() / 255.0


def check_pair(images: Tensor, targets: Tensor) -> None:
    """Raise ValueError for tensors that a similarity measure would score wrongly without an error.

    They are not fp32 of shape [N, 3, H, W], of two shapes, or have levels outside [0, 1].
    """
    for tensor in (images, targets):
        if tensor.dtype != torch.float32 or tensor.ndim != 4 or tensor.shape[1] != 3:
            raise ValueError(f"expected fp32 [N, 3, H, W], got {tensor.dtype} {list(tensor.shape)}")
        # Negated, so that NaN is refused with the rest.
        if not bool(((tensor >= 0) & (tensor <= 1)).all()):
            raise ValueError(f"expected levels in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
    if images.shape != targets.shape:
        raise ValueError(f"expected one shape, got {list(images.shape)} and {list(targets.shape)}")


MIN_MSE = 1e-10
"""Floor of the mean squared error in PSNR: identical images have 100 dB instead of infinity."""

Images = Float32[Tensor, "batch 3 height width"]


def mean_squared_error(images: Images, targets: Images) -> Float64[Tensor, " batch"]:
    """Average the squared difference of images in [0, 1] over pixels and channels; ValueError as check_pair."""
    check_pair(images, targets)
    return (images.double() - targets.double()).square().flatten(1).mean(1)


def peak_signal_to_noise_ratio(images: Images, targets: Images) -> Float64[Tensor, " batch"]:
    """Compute 10 log10(1 / MSE) in dB, the MSE at least MIN_MSE; ValueError as check_pair."""
    return -10.0 * mean_squared_error(images, targets).clamp(min=MIN_MSE).log10()


def coefficient_of_determination(images: Images, targets: Images) -> Float64[Tensor, " batch"]:
    """Compute R² = 1 - MSE / variance of the target, each channel with its own mean; NaN for a single colour.

    ValueError as check_pair.
    """
    error = mean_squared_error(images, targets)
    pixels = targets.double().flatten(2)
    # Not compared with 0: the mean of equal numbers may differ from them in the last bit.
    constant = (pixels == pixels[..., :1]).flatten(1).all(1)
    variance = (pixels - pixels.mean(-1, keepdim=True)).square().flatten(1).mean(1)
    return (1 - error / variance).masked_fill(constant, torch.nan)


def structural_similarity(images: Images, targets: Images) -> Float32[Tensor, " batch"]:
    """Average SSIM over complete windows and the three channels: Gaussian 11x11, sigma 1.5, K1 0.01, K2 0.03.

    ValueError as check_pair, or for a side under 11 pixels.
    """
    check_pair(images, targets)
    if min(images.shape[-2:]) < WINDOW:
        # Without this the blur is left out along the short side, and a number comes back all the same.
        raise ValueError(f"expected sides of at least {WINDOW} pixels, got {list(images.shape)}")
    similarity: Tensor = pytorch_msssim.ssim(
        images, targets, data_range=1.0, size_average=False, win_size=WINDOW, win_sigma=1.5, K=(0.01, 0.03)
    )
    return similarity
