"""The autoregressive half of GLM-Image as a component: it samples the image tokens, and scores them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import nn

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from grpo_core.policies.glm_image.autoregressive import EncodedPrompts, encode_prompts, sample_tokens, score_tokens
from grpo_core.policies.glm_image.loading import pixel_unit
from grpo_core.policies.glm_image.settings import GlmImageSettings, TokenGrids, token_grids
from grpo_core.policies.trained import TrainedComponent, TrainedModel, autocast, train_model
from grpo_core.records import ActionLogprobs, Entropies, SampledTokens, TokenBatch

# Short names such as "q_proj" would also match the vision tower, which sampling from text never runs.
LANGUAGE_MODEL_LINEARS = (
    r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
)
FROZEN_PARTS = ("model.visual.", "model.vqmodel.")


train_token_model = partial(train_model, default_targets=LANGUAGE_MODEL_LINEARS, own_frozen=FROZEN_PARTS)
"""`train_model` for the autoregressive half."""


class GlmImageTokens(TrainedComponent[TokenBatch]):
    """The stream of image tokens: a preview grid, then the large grid."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        settings: GlmImageSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Combine the parts.

        Args:
            trained: the pipeline's autoregressive model, or the frozen one where only the decoder is trained.
        """
        self.pipeline = pipeline
        self.trained = trained
        self.autocast = autocast
        self.sample_with(settings)

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings from this call on.

        Raises:
            InputError: a size that the model cannot generate.
        """
        self.grids = self.grids_of(settings.size)
        self.settings = settings

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

    def grids_of(self, size: ImageSize) -> TokenGrids:
        """Return the grids of an image of this size; InputError if it cannot be generated."""
        return token_grids(size, pixel_unit(self.pipeline))

    def sizes_of(self, tokens: TokenBatch) -> tuple[ImageSize, ...]:
        """Return the size of each row's image."""
        return tokens.sizes or (self.settings.size,) * len(tokens)

    def _encode(self, prompts: Sequence[str], size: ImageSize) -> EncodedPrompts:
        return encode_prompts(self._base.model, self.pipeline.processor, prompts, size)

    def _encode_rows(self, tokens: TokenBatch) -> EncodedPrompts:
        """Encode the prompt of each row for the size of its image; each distinct pair is encoded once."""
        pairs = list(zip(self.sizes_of(tokens), tokens.prompts, strict=True))
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
        self, prompts: Sequence[str], group_size: int, seeds: Sequence[int], size: ImageSize | None = None
    ) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other.

        Args:
            seeds: len(prompts) * group_size seeds, one per sequence.
            size: of the images; None: that of the settings.
        """
        size = size or self.settings.size
        encoded = self._encode(list(prompts), size)
        with self._sampling(self._device):
            ids, logprobs, support = sample_tokens(
                self.trained.model,
                encoded,
                group_size=group_size,
                tokens=self.grids_of(size).tokens,
                seeds=seeds,
                vocabulary=self.vocabulary,
                temperature=self.settings.temperature,
                truncation=self.settings,
            )
        rows = tuple(prompt for prompt in prompts for _ in range(group_size))
        mask = torch.ones(ids.shape, dtype=torch.bool)
        tokens = TokenBatch(rows, ids.cpu(), mask, self.settings.temperature, support, (size,) * len(rows))
        lengths = encoded.attention_mask.sum(-1).repeat_interleave(group_size).cpu()
        # The size of an image determines its number of tokens.
        finished = torch.ones(len(rows), dtype=torch.bool)
        return SampledTokens(tokens, logprobs.cpu(), finished, self.max_length, lengths)

    def _score(self, model: nn.Module, actions: TokenBatch, *, entropy: Entropies, kl: bool = False) -> ActionLogprobs:
        assert not kl, "the KL over image codes is estimated from log-probs"
        sizes = self.sizes_of(actions)
        for size in dict.fromkeys(sizes):
            require_fit(
                actions.select([row for row, own in enumerate(sizes) if own == size]), self.grids_of(size), size
            )
        device = self._device
        with autocast(self._device, self.autocast):
            return score_tokens(
                model,
                self._encode_rows(actions),
                actions.token_ids.to(device),
                actions.loss_mask.to(device),
                vocabulary=self.vocabulary,
                temperature=actions.temperature,
                support=actions.support,
                entropy=entropy,
            )


def require_fit(tokens: TokenBatch, grids: TokenGrids, size: ImageSize) -> None:
    """Raise InputError for rows with more tokens than an image of this size has."""
    places = torch.arange(1, tokens.loss_mask.shape[1] + 1, device=tokens.loss_mask.device)
    longest = int((tokens.loss_mask * places).amax()) if tokens.loss_mask.numel() else 0
    if longest > grids.tokens:
        raise InputError("token_ids", longest, f"A {size} image has {grids.tokens} tokens.")
