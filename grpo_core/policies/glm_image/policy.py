"""GLM-Image behind the Policy protocol: a token model that writes an image, and a decoder that paints it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from grpo_core.groups import GroupRequest, RolloutGroup
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.glm_image.decoder import GlmImageDecoder, train_decoder
from grpo_core.policies.glm_image.loading import load_pipeline, read_initial_state
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.glm_image.token_model import GlmImageTokens, train_token_model
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained import FrozenModel, TrainedModel, TrainingChoice, use_attention
from grpo_core.records import SampledActions
from grpo_core.streams import Stream

CPU = torch.device("cpu")


class GlmImagePolicy:
    """Both halves of GLM-Image, each trained or frozen.

    Attributes:
        tokens: the autoregressive half.
        decoder: the diffusion half.
        components: the trained halves by stream.
    """

    def __init__(self, tokens: GlmImageTokens, decoder: GlmImageDecoder, trained: Sequence[Stream]) -> None:
        """Combine the halves; `load` is the usual way.

        Args:
            trained: streams of the halves that are trained, in the order of STREAMS.
        """
        self.tokens, self.decoder = tokens, decoder
        halves: Mapping[Stream, Any] = {"tokens": tokens, "denoising": decoder}
        self.components: Mapping[Stream, PolicyComponent] = {stream: halves[stream] for stream in trained}

    @property
    def settings(self) -> GlmImageSettings:
        """How images are sampled and scored."""
        return self.tokens.settings

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings for sampling, scoring and reading prompts from this call on.

        Raises:
            InputError: a size that the model cannot generate.
        """
        self.tokens.sample_with(settings)
        self.decoder.settings = settings

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

        Args:
            choices: what of each half is trained; a half without a choice is frozen.
            autocast: of the trained halves; a frozen decoder computes in its own dtype.
            attn_implementation: of the token model.

        Raises:
            InputError: no such model, a size the model cannot generate, or adapter targets that match nothing.
        """
        pipeline = load_pipeline(model, dtype=dtype, device=device)
        writer, painter = pipeline.vision_language_encoder, pipeline.transformer
        use_attention(writer, attn_implementation)
        initial_state = partial(read_initial_state, model, dtype=dtype)
        tokens: TrainedModel = FrozenModel(writer)
        denoising: TrainedModel = FrozenModel(painter)
        if "tokens" in choices:
            tokens = train_token_model(
                writer,
                choices["tokens"],
                base_name=model,
                initial_state=partial(initial_state, "tokens"),
            )
        if "denoising" in choices:
            denoising = train_decoder(
                painter,
                choices["denoising"],
                base_name=model,
                initial_state=partial(initial_state, "denoising"),
            )
        return cls(
            GlmImageTokens(pipeline, settings, tokens, autocast=autocast),
            GlmImageDecoder(pipeline, settings, denoising, autocast=autocast if "denoising" in choices else None),
            tuple(choices),
        )

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the tokens of all groups at once, then paint group by group."""
        for request, drafts in sample_drafts(requests, self.tokens.sample):
            (painted,) = self.decoder.sample(
                [request],
                drafts.actions,
                size=request.size or self.settings.size,
                rows_per_call=self.settings.decode_batch_size,
            )
            sampled: Mapping[Stream, SampledActions | None] = {"tokens": drafts, "denoising": painted.sampled}
            streams = {stream: actions for stream, actions in sampled.items() if actions is not None}
            yield RolloutGroup(request, streams, painted.images)
