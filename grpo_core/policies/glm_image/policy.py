"""GLM-Image behind the Policy protocol. Grids, latents and denoising are known only in this package."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from grpo_core.policies.glm_image.autoregressive import EncodedPrompts, encode_prompts, sample_tokens, score_tokens
from grpo_core.policies.glm_image.decoding import decode_group, large_grid_ids
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit, read_initial_state
from grpo_core.policies.glm_image.settings import GlmImageSettings, TokenGrids, token_grids
from grpo_core.policies.trained import (
    TrainedModel,
    TrainedPolicy,
    TrainingChoice,
    autocast,
    train_model,
    use_attention,
)
from grpo_core.records import BrokenImage, Entropies, SampledTokens, TokenBatch, TokenLogprobs

# Short names such as "q_proj" would also match the vision tower, which sampling from text never runs.
LANGUAGE_MODEL_LINEARS = (
    r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
)
FROZEN_PARTS = ("model.visual.", "model.vqmodel.")


def train_token_model(
    base: Any, choice: TrainingChoice, model: str, *, initial_state: Callable[[], dict[str, Tensor]]
) -> TrainedModel:
    """Call `train_model` for the autoregressive half.

    Raises:
        InputError: adapter targets or frozen names that match nothing, or nothing that would be trained.
    """
    return train_model(
        base,
        choice,
        base_name=model,
        default_targets=LANGUAGE_MODEL_LINEARS,
        own_frozen=FROZEN_PARTS,
        initial_state=initial_state,
    )


CPU = torch.device("cpu")


class GlmImagePolicy(TrainedPolicy):
    """The autoregressive half is the policy; the diffusion decoder is frozen and part of the environment."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        settings: GlmImageSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Combine the parts; `load` is the usual way."""
        self.pipeline = pipeline
        self.trained = trained
        self.autocast = autocast
        self.sample_with(settings)

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings for sampling, rendering and reading prompts from this call on.

        Raises:
            InputError: a size that the model cannot generate, or a truncation outside its range.
        """
        self.truncation = settings.truncation
        self.grids = self._grids_of(settings.size)
        self.settings = settings

    @classmethod
    def load(
        cls,
        model: str,
        settings: GlmImageSettings,
        choice: TrainingChoice,
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
        trained = train_token_model(base, choice, model, initial_state=lambda: read_initial_state(model, dtype))
        return cls(pipeline, settings, trained, autocast=autocast)

    @property
    def max_length(self) -> int:
        """Number of tokens of both grids of an image of the settings' size."""
        return self.grids.tokens

    @property
    def vocabulary(self) -> int:
        """Number of image codes: ids [0, vocabulary) are sampled and scored."""
        return int(self._base.config.vq_config.num_embeddings)

    @property
    def _base(self) -> Any:
        return self.pipeline.vision_language_encoder

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._base.device
        return device

    def _grids_of(self, size: ImageSize) -> TokenGrids:
        return token_grids(size, pixel_unit(self.pipeline))

    def _sizes_of(self, tokens: TokenBatch) -> tuple[ImageSize, ...]:
        return tokens.sizes or (self.settings.size,) * len(tokens)

    def _encode(self, prompts: Sequence[str], size: ImageSize) -> EncodedPrompts:
        return encode_prompts(self._base.model, self.pipeline.processor, prompts, size)

    def _encode_rows(self, tokens: TokenBatch) -> EncodedPrompts:
        """Encode the prompt of each row for the size of its image; each distinct pair is encoded once."""
        pairs = list(zip(self._sizes_of(tokens), tokens.prompts, strict=True))
        by_size: dict[ImageSize, dict[str, None]] = {}
        for size, prompt in pairs:
            by_size.setdefault(size, {})[prompt] = None
        distinct = ((size, prompt) for size, prompts in by_size.items() for prompt in prompts)
        place = {pair: index for index, pair in enumerate(distinct)}
        rows = torch.tensor([place[pair] for pair in pairs], device=self._device)
        # The processor reads prompts of one size at a time.
        encoded = [self._encode(list(prompts), size) for size, prompts in by_size.items()]
        return EncodedPrompts.join(encoded).select(rows)

    def sample(
        self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int], size: ImageSize | None = None
    ) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other."""
        size = size or self.settings.size
        encoded = self._encode(list(prompts), size)
        with self._sampling(self._device):
            ids, logprobs, support = sample_tokens(
                self.trained.model,
                encoded,
                group_size=group_size,
                tokens=self._grids_of(size).tokens,
                seeds=seeds,
                vocabulary=self.vocabulary,
                temperature=self.settings.temperature,
                truncation=self.truncation,
            )
        rows = tuple(prompt for prompt in prompts for _ in range(group_size))
        mask = torch.ones(ids.shape, dtype=torch.bool)
        tokens = TokenBatch(rows, ids.cpu(), mask, self.settings.temperature, support, (size,) * len(rows))
        lengths = encoded.attention_mask.sum(-1).repeat_interleave(group_size).cpu()
        # The size of an image determines its number of tokens.
        return SampledTokens(tokens, logprobs.cpu(), torch.ones(len(rows), dtype=torch.bool), lengths)

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image | BrokenImage]:
        """Return the decoded image of each row."""
        self._require_fit(tokens)
        images: list[Image.Image | BrokenImage | None] = [None] * len(tokens)
        pairs = list(zip(tokens.prompts, self._sizes_of(tokens), strict=True))
        for prompt, size in dict.fromkeys(pairs):
            siblings = [row for row, pair in enumerate(pairs) if pair == (prompt, size)]
            grids = self._grids_of(size)
            for start in range(0, len(siblings), self.settings.decode_batch_size):
                chunk = siblings[start : start + self.settings.decode_batch_size]
                token_ids, loss_mask = _fitted(tokens.token_ids[chunk], grids), _fitted(tokens.loss_mask[chunk], grids)
                decoded = decode_group(
                    self.pipeline,
                    prompt,
                    large_grid_ids(token_ids, loss_mask, grids).to(self._device),
                    size=size,
                    noise_seeds=[noise_seeds[row] for row in chunk],
                    num_inference_steps=self.settings.num_inference_steps,
                    guidance_scale=self.settings.guidance_scale,
                )
                for row, image in zip(chunk, decoded, strict=True):
                    images[row] = image
        return [image for image in images if image is not None]

    def _require_fit(self, tokens: TokenBatch) -> None:
        """Raise InputError for rows with more tokens than an image of their size has."""
        places = torch.arange(1, tokens.loss_mask.shape[1] + 1, device=tokens.loss_mask.device)
        lengths = (tokens.loss_mask * places).amax(-1)
        sizes = self._sizes_of(tokens)
        for size in dict.fromkeys(sizes):
            longest = max(length for length, own in zip(lengths.tolist(), sizes, strict=True) if own == size)
            if longest > (most := self._grids_of(size).tokens):
                raise InputError("token_ids", longest, f"A {size} image has {most} tokens.")

    def _score(self, model: nn.Module, tokens: TokenBatch, *, entropy: Entropies) -> TokenLogprobs:
        self._require_fit(tokens)
        device = self._device
        with autocast(self._device, self.autocast):
            return score_tokens(
                model,
                self._encode_rows(tokens),
                tokens.token_ids.to(device),
                tokens.loss_mask.to(device),
                vocabulary=self.vocabulary,
                temperature=tokens.temperature,
                support=tokens.support,
                entropy=entropy,
            )


def _fitted(values: Int[Tensor, "rows time"], grids: TokenGrids) -> Int[Tensor, "rows full"]:
    """Cut what is padding for images of these grids, or fill short grids on the right with zeros (False)."""
    return nn.functional.pad(values, (0, grids.tokens - values.shape[1]))
