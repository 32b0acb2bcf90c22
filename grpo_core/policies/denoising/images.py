"""From the levels that a pipeline returns to images."""

import numpy as np
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image

from grpo_core.records import BrokenImage


def image_of(levels: Float[np.ndarray, "height width 3"]) -> Image.Image | BrokenImage:
    """Convert levels in [0, 1] to an image; NaN is detected here, because 8-bit levels cannot represent it."""
    broken = ~np.isfinite(levels).all(-1)
    image: Image.Image
    (image,) = VaeImageProcessor.numpy_to_pil(np.where(broken[..., None], 0.0, levels)[None])
    if not broken.any():
        return image
    return BrokenImage(image, f"{broken.mean():.1%} of the pixels are not numbers")
