"""The diffusion decoder: the image that a draft's large grid describes, and its noisy denoising steps."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.encoded_prompts import RecentlyUsed
from grpo_core.policies.glm_image.loading import pixel_unit
from grpo_core.policies.glm_image.settings import DECODER, TEXT_ENCODER, GlmImageSettings, TokenGrids, token_grids
from grpo_core.policies.glm_image.sources import SOURCE_ARGUMENTS, SourceEncoder, shared_by_rows
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize


def require_fit(tokens: TokenBatch, grids: TokenGrids, size: ImageSize) -> None:
    """Raise InputError for rows with more tokens than an image of this size has."""
    places = torch.arange(1, tokens.loss_mask.shape[1] + 1, device=tokens.loss_mask.device)
    longest = int((tokens.loss_mask * places).amax()) if tokens.loss_mask.numel() else 0
    if longest > grids.tokens:
        raise InputError("token_ids", longest, f"A {size} image has {grids.tokens} tokens.")


_GLYPH_BYTES = 64 * 1024**2
"""On the device, for embeddings of glyphs."""


class GlmImageDecoder(DenoisingComponent):
    """The stream of denoising steps; an image is made of a draft's large grid and of the prompt's quoted text."""

    pipeline: GlmImagePipeline
    settings: GlmImageSettings
    parts = (TEXT_ENCODER, DECODER)

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        settings: GlmImageSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
        sources: SourceEncoder | None = None,
        offload: ComponentOffload = NO_OFFLOAD,
    ) -> None:
        super().__init__(pipeline, settings, trained, autocast=autocast, offload=offload)
        self.sources = sources or SourceEncoder(pipeline, offload)
        self._glyphs, self._encode_glyphs = RecentlyUsed[Tensor](_GLYPH_BYTES), pipeline._get_glyph_embeds

    def prepare_for_update(self, actions: DenoisingBatch | None = None) -> None:
        """Enter the mode for gradients; source images are encoded by the token model before the first pass."""
        super().prepare_for_update(actions)
        sources = None if actions is None else actions.sources
        for source in dict.fromkeys(itertools.chain(*(sources or ()))):
            self.sources.codes(source)

    @property
    def one_prompt_per_call(self) -> bool:
        """True: glyph embeddings of several prompts are padded to one length, and the padding is not masked."""
        return True

    def call_arguments(
        self,
        prompts: Sequence[str],
        drafts: TokenBatch | None,
        size: ImageSize,
        sources: tuple[SourceImage, ...] = (),
    ) -> Mapping[str, Any]:
        """Return the arguments of the pipeline's call for rows of one prompt."""
        assert drafts is not None, "an image is made of tokens"
        grids = token_grids(size, pixel_unit(self.pipeline))
        device, dtype = self.pipeline.transformer.device, self.pipeline.dtype
        if sources:
            grids = grids.of_edit
        require_fit(drafts, grids, size)
        token_ids, loss_mask = _fitted(drafts.token_ids, grids), _fitted(drafts.loss_mask, grids)
        return {
            "prompt_embeds": self._glyph_embeds(prompts[0], device=device, dtype=dtype).expand(len(prompts), -1, -1),
            "prior_token_ids": large_grid_ids(token_ids, loss_mask, grids).to(device, non_blocking=True),
            "height": size.height,
            "width": size.width,
            "guidance_scale": self.settings.guidance_scale,
            **(self.sources.decoder_arguments(sources, len(prompts)) if sources else {}),
        }

    def start_latents(self, arguments: Mapping[str, Any]) -> Float[Tensor, "rows ..."]:
        """Return the latents that the pipeline would start from, which do not depend on source images."""
        return super().start_latents({name: arguments[name] for name in arguments if name not in SOURCE_ARGUMENTS})

    @contextmanager
    def calling(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Let rows share the embeddings of the negative prompt, and the keys and values of their source images."""

        def shared(prompts: Sequence[str], *args: Any, **kwargs: Any) -> Float[Tensor, "rows length dim"]:
            return self._glyph_embeds(prompts[0], *args, **kwargs).repeat(len(prompts), 1, 1)

        own: Any = self.pipeline
        own._get_glyph_embeds = shared
        try:
            with shared_by_rows(self.pipeline.transformer) if "image" in arguments else nullcontext():
                yield
        finally:
            del own._get_glyph_embeds

    @torch.no_grad()
    def _glyph_embeds(self, prompt: str, *args: Any, **kwargs: Any) -> Float[Tensor, "1 length dim"]:
        """Return the embeddings of a prompt's glyphs; those of the same texts are made once and kept."""
        (texts,) = self.pipeline.get_glyph_texts(prompt)
        # An image's own prompt is encoded outside the pipeline's call, and so without its autocast.
        key = (*texts, torch.is_autocast_enabled(self._device.type))
        # Of one row: the encoder's last bits depend on the number of rows.
        return self._glyphs.get(key, lambda: self._encode_glyphs([prompt], *args, **kwargs))


def _fitted(values: Shaped[Tensor, "rows time"], grids: TokenGrids) -> Shaped[Tensor, "rows full"]:
    """Cut what is padding for images of these grids, or fill short grids on the right with zeros (False)."""
    return torch.nn.functional.pad(values, (0, grids.tokens - values.shape[1]))


def large_grid_ids(
    token_ids: Int[Tensor, "samples time"], loss_mask: Bool[Tensor, "samples time"], grids: TokenGrids
) -> Int[Tensor, "samples prior"]:
    """Return the decoder's conditioning: the large grid, each token doubled along both axes.

    Cells without a token, of an image that ended early, repeat the last one, so that it can be viewed and scored.
    """
    large = slice(grids.preview.tokens, grids.tokens)
    token_ids = torch.where(loss_mask, token_ids, 0)
    written = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    last = token_ids.gather(1, written - 1)
    ids = torch.where(loss_mask, token_ids, last)[:, large]
    ids = ids.reshape(-1, grids.large.rows, grids.large.columns)
    return ids.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
