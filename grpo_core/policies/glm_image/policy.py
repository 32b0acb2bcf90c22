"""GLM-Image behind the Policy protocol. Grids, latents and denoising are known only in this package."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from grpo_core.groups import GroupRequest, RolloutGroup
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.glm_image.decoding import decode_group, large_grid_ids
from grpo_core.policies.glm_image.loading import load_pipeline, read_initial_state
from grpo_core.policies.glm_image.settings import GlmImageSettings, TokenGrids
from grpo_core.policies.glm_image.token_model import GlmImageTokens, train_token_model
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained import TrainingChoice, use_attention
from grpo_core.records import BrokenImage, TokenBatch
from grpo_core.streams import Stream

CPU = torch.device("cpu")


class GlmImagePolicy:
    """A token model that writes the image, and a diffusion decoder that paints it."""

    def __init__(self, pipeline: GlmImagePipeline, settings: GlmImageSettings, tokens: GlmImageTokens) -> None:
        """Combine the parts; `load` is the usual way."""
        self.pipeline = pipeline
        self.tokens = tokens
        self.settings = settings

    @property
    def components(self) -> Mapping[Stream, PolicyComponent]:
        """The trained components by stream."""
        return {"tokens": self.tokens}

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings for sampling, rendering and reading prompts from this call on.

        Raises:
            InputError: a size that the model cannot generate, or a truncation outside its range.
        """
        self.tokens.sample_with(settings)
        self.settings = settings

    @classmethod
    def load(
        cls,
        model: str,
        settings: GlmImageSettings,
        choices: Mapping[Stream, TrainingChoice],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        autocast: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> "GlmImagePolicy":
        """Load by folder or hub name.

        Raises:
            InputError: no such model, a size the model cannot generate, or adapter targets that match nothing.
        """
        pipeline = load_pipeline(model, dtype=dtype, device=device)
        base = pipeline.vision_language_encoder
        use_attention(base, attn_implementation)
        trained = train_token_model(
            base, choices["tokens"], model, initial_state=lambda: read_initial_state(model, dtype)
        )
        return cls(pipeline, settings, GlmImageTokens(pipeline, settings, trained, autocast=autocast))

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the tokens of all groups at once, then decode group by group."""
        for request, drafts in sample_drafts(requests, self.tokens.sample):
            outputs = self.render(drafts.actions, noise_seeds=request.noise_seeds)
            yield RolloutGroup(request, {"tokens": drafts}, tuple(outputs))

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image | BrokenImage]:
        """Return the decoded image of each row."""
        self.tokens.require_fit(tokens)
        images: list[Image.Image | BrokenImage | None] = [None] * len(tokens)
        pairs = list(zip(tokens.prompts, self.tokens.sizes_of(tokens), strict=True))
        for prompt, size in dict.fromkeys(pairs):
            siblings = [row for row, pair in enumerate(pairs) if pair == (prompt, size)]
            grids = self.tokens.grids_of(size)
            for start in range(0, len(siblings), self.settings.decode_batch_size):
                chunk = siblings[start : start + self.settings.decode_batch_size]
                token_ids, loss_mask = _fitted(tokens.token_ids[chunk], grids), _fitted(tokens.loss_mask[chunk], grids)
                decoded = decode_group(
                    self.pipeline,
                    prompt,
                    large_grid_ids(token_ids, loss_mask, grids).to(self.pipeline.transformer.device),
                    size=size,
                    noise_seeds=[noise_seeds[row] for row in chunk],
                    num_inference_steps=self.settings.num_inference_steps,
                    guidance_scale=self.settings.guidance_scale,
                )
                for row, image in zip(chunk, decoded, strict=True):
                    images[row] = image
        return [image for image in images if image is not None]

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed."""
        self.tokens.save_weights(folder)

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""
        self.tokens.load_weights(folder)


def _fitted(values: Int[Tensor, "rows time"], grids: TokenGrids) -> Int[Tensor, "rows full"]:
    """Cut what is padding for images of these grids, or fill short grids on the right with zeros (False)."""
    return nn.functional.pad(values, (0, grids.tokens - values.shape[1]))
