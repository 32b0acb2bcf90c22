"""From latents to the levels that a pipeline returns, and from these to images."""

from typing import Any

import numpy as np
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image

from grpo_core.image_size import ImageSize
from grpo_core.records import BrokenImage

PIXELS_AT_ONCE = 1024**2
"""An autoencoder decodes images with at most this many pixels together at once, and larger ones one by one."""


def slice_decoding(pipeline: Any, images: int, size: ImageSize) -> None:
    """Let the pipeline's autoencoder decode this many images at once if they are small, and one by one otherwise.

    Its tensors are the largest of all: one by one, they take no more memory for more images.
    """
    vae: Any = getattr(pipeline, "vae", None)
    if hasattr(vae, "use_slicing"):
        vae.use_slicing = images * size.pixels > PIXELS_AT_ONCE


def image_of(levels: Float[np.ndarray, "height width 3"]) -> Image.Image | BrokenImage:
    """Convert levels in [0, 1] to an image; NaN is detected here, because 8-bit levels cannot represent it."""
    broken = ~np.isfinite(levels).all(-1)
    image: Image.Image
    (image,) = VaeImageProcessor.numpy_to_pil(np.where(broken[..., None], 0.0, levels)[None])
    if not broken.any():
        return image
    return BrokenImage(image, f"{broken.mean():.1%} of the pixels are not numbers")
