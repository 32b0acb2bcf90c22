"""How alike two images are, pixel by pixel: mean squared error, peak signal-to-noise ratio, R², SSIM.

SSIM: Wang, Bovik, Sheikh and Simoncelli, 2004, "Image Quality Assessment: From Error Visibility to Structural
Similarity", equation 13 with the constants of section III.B.
"""

import pytorch_msssim
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from grpo_core.rewards.images import WINDOW
from grpo_core.rewards.tensors import check_pair

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
    """Compute R² = 1 - MSE / variance of the target, over pixels and channels; each channel has its own mean.

    NaN for a target of a single colour. ValueError as check_pair.
    """
    error = mean_squared_error(images, targets)
    pixels = targets.double().flatten(2)
    # Not compared with 0: the mean of equal numbers may differ from them in the last bit.
    constant = (pixels == pixels[..., :1]).flatten(1).all(1)
    variance = (pixels - pixels.mean(-1, keepdim=True)).square().flatten(1).mean(1)
    return (1 - error / variance).masked_fill(constant, torch.nan)


def structural_similarity(images: Images, targets: Images) -> Float32[Tensor, " batch"]:
    """Average SSIM over complete windows and the three channels: Gaussian 11x11, sigma 1.5, K1 0.01, K2 0.03.

    Raises:
        ValueError: as check_pair, or a side under 11 pixels.
    """
    check_pair(images, targets)
    if min(images.shape[-2:]) < WINDOW:
        # Without this the blur is left out along the short side, and a number comes back all the same.
        raise ValueError(f"expected sides of at least {WINDOW} pixels, got {list(images.shape)}")
    similarity: Tensor = pytorch_msssim.ssim(
        images, targets, data_range=1.0, size_average=False, win_size=WINDOW, win_sigma=1.5, K=(0.01, 0.03)
    )
    return similarity
