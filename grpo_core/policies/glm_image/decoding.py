"""Decode stored tokens to images with the frozen diffusion decoder and fixed noise."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import GlmImagePipeline
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from grpo_core.image_size import ImageSize
from grpo_core.policies.glm_image.settings import TokenGrids
from grpo_core.records import BrokenImage
from grpo_core.seeds import make_generator


def large_grid_ids(
    token_ids: Int[Tensor, "samples time"], loss_mask: Bool[Tensor, "samples time"], grids: TokenGrids
) -> Int[Tensor, "samples prior"]:
    """Return the decoder's conditioning: the large grid, each token doubled along both axes.

    An image that ended early has cells without a token; they repeat the last sampled token, so that the
    image can still be viewed and scored.
    """
    large = slice(grids.preview.tokens, grids.tokens)
    token_ids = torch.where(loss_mask, token_ids, 0)
    written = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    last = token_ids.gather(1, written - 1)
    ids = torch.where(loss_mask, token_ids, last)[:, large]
    ids = ids.reshape(-1, grids.large.rows, grids.large.columns)
    return ids.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


@torch.no_grad()
def decode_group(
    pipeline: GlmImagePipeline,
    prompt: str,
    prior_ids: Int[Tensor, "samples prior"],
    *,
    size: ImageSize,
    noise_seeds: Sequence[int],
    num_inference_steps: int,
    guidance_scale: float,
) -> list[Image.Image | BrokenImage]:
    """Decode rows of ONE prompt.

    Glyph embeddings of different prompts are padded to one length and the padding is not masked, so a row of a
    mixed batch would depend on the other rows.

    Args:
        pipeline: its autoregressive part is not used.
        prompt: the rows' prompt; the decoder renders its quoted text.
        prior_ids: from large_grid_ids.
        noise_seeds: one per row; equal seeds give equal noise.
        guidance_scale: classifier-free guidance of the decoder; 1 or less: no guidance.
    """
    # One generator per row: a shared one would continue where the previous row stopped.
    generators = [make_generator(seed) for seed in noise_seeds]
    levels = pipeline(
        [prompt] * len(noise_seeds),
        height=size.height,
        width=size.width,
        prior_token_ids=prior_ids,
        generator=generators,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        output_type="np",
    ).images
    return [_image(each) for each in levels]


def _image(levels: Float[np.ndarray, "height width 3"]) -> Image.Image | BrokenImage:
    """Convert levels in [0, 1] to an image; NaN is detected here, because 8-bit levels cannot represent it."""
    broken = ~np.isfinite(levels).all(-1)
    image: Image.Image
    (image,) = VaeImageProcessor.numpy_to_pil(np.where(broken[..., None], 0.0, levels)[None])
    if not broken.any():
        return image
    return BrokenImage(image, f"{broken.mean():.1%} of the pixels are not numbers")
