"""Source images of an edit: their codes for the token model, and their keys and values in the decoder.

The model's own path encodes the sources in every pass, and in diffusers 0.42 it fails: it concatenates features of
which the quantizer wants a list. Codes depend on the image alone, so they stand among the prompt's ids.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import GlmImagePipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from PIL import Image

from grpo_core.policies.encoded_prompts import RecentlyUsed
from grpo_core.policies.glm_image.loading import pixel_unit
from grpo_core.policies.glm_image.prompts import Codes
from grpo_core.policies.glm_image.settings import AUTOREGRESSIVE, SourceLimits, refuse_coarse_codes
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize


class SourceEncoder:
    """Encodes source images, each once while its codes are kept; siblings and passes share them."""

    def __init__(self, pipeline: GlmImagePipeline, offload: ComponentOffload = NO_OFFLOAD) -> None:
        self._pipeline, self._offload = pipeline, offload
        self._processor = pipeline.processor.image_processor
        self._model: Any = pipeline.vision_language_encoder
        self._kept = RecentlyUsed[Codes]()
        self.limits = SourceLimits.of(self._processor)

    def image(self, source: SourceImage) -> Image.Image:
        """Decode a source in the size in which both halves read it; InputError names its digest."""
        image = source.open()
        size = self.limits.nearest(ImageSize(*image.size))
        return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)

    def codes(self, source: SourceImage) -> Codes:
        """Return the codes of a source, on the CPU; InputError names its digest."""
        return self._kept.get(source.digest, lambda: self._encode(self.image(source)))

    @torch.no_grad()
    def _encode(self, image: Image.Image) -> Codes:
        refuse_coarse_codes(self._pipeline.name_or_path, self.limits.unit, pixel_unit(self._pipeline))
        inputs = self._processor(images=[image], return_tensors="pt")
        with self._offload.using(AUTOREGRESSIVE):
            device = next(self._model.parameters()).device
            grid = inputs["image_grid_thw"].to(device)
            # Alone and in the dtype of its weights: the nearest code depends on neither other images nor the caller.
            with torch.autocast(device.type, enabled=False):
                features = self._model.get_image_features(inputs["pixel_values"].to(device), grid).pooler_output
                codes: torch.Tensor = self._model.get_image_tokens(list(features), grid)
        _, rows, columns = grid[0].tolist()
        assert (columns, rows) == tuple(side // self.limits.unit for side in image.size), "one code per unit"
        return codes.reshape(rows, columns).cpu()

    def decoder_arguments(self, sources: Sequence[SourceImage], rows: int) -> dict[str, Any]:
        """Return the arguments of the pipeline's call for rows with the same sources."""
        device = self._pipeline.transformer.device
        codes = [self.codes(source) for source in sources]
        # As for the image that is made: each token covers two by two patches.
        doubled = [each.repeat_interleave(2, 0).repeat_interleave(2, 1) for each in codes]
        grids = torch.tensor([[1, *each.shape] for each in doubled], device=device)
        return {
            "image": [[self.image(source) for source in sources]] * rows,
            "prior_token_image_ids": [torch.cat([each.flatten() for each in doubled]).to(device)] * rows,
            "source_image_grid_thw": [grids] * rows,
        }


SOURCE_ARGUMENTS = ("image", "prior_token_image_ids", "source_image_grid_thw")
"""Names of what `SourceEncoder.decoder_arguments` gives."""


@contextmanager
def shared_by_rows(transformer: Any) -> Iterator[None]:
    """Let the rows of a call of the pipeline, whose sources are the same, share the sources' keys and values.

    The first row's are made, with gradients where they are enabled. A pass that reads the cache gets a copy of its
    lists: a layer that is recomputed in the backward pass reads them after the pipeline has emptied its own.
    """
    forward, replaced = transformer.forward, vars(transformer).get("forward")

    def shared(*args: Any, kv_caches: GlmImageKVCache | None = None, **kwargs: Any) -> Any:
        if kv_caches is not None and kv_caches[0].mode == "write" and kv_caches[0].current_sample_idx > 0:
            return None
        if kv_caches is not None and kv_caches[0].mode == "read":
            kv_caches = _copied(kv_caches)
        return forward(*args, kv_caches=kv_caches, **kwargs)

    transformer.forward = shared
    try:
        yield
    finally:
        if replaced is None:
            del transformer.forward
        else:
            transformer.forward = replaced


def _copied(caches: GlmImageKVCache) -> GlmImageKVCache:
    copied = GlmImageKVCache(caches.num_layers)
    copied.set_mode("read")
    for own, layer in zip(copied.caches, caches.caches, strict=True):
        own.k_caches, own.v_caches = list(layer.k_caches), list(layer.v_caches)
    return copied
