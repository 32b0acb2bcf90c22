"""GLM-Image behind the Policy protocol: a token model that writes an image, and a decoder that paints it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import nn

from grpo_core.policies.causal_lm.decode_steps import StaticStep
from grpo_core.policies.causal_lm.sampling_scoring import sample_completions, score_completions
from grpo_core.policies.causal_lm.written import SamplingRule
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.encoded_prompts import EncodedPrompt, EncodedPrompts, RecentlyUsed, pad_prompts
from grpo_core.policies.glm_image.decode_step import DecodeStep
from grpo_core.policies.glm_image.decoding import GlmImageDecoder, require_fit
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit, train_half
from grpo_core.policies.glm_image.prompts import encode_prompt
from grpo_core.policies.glm_image.settings import (
    AUTOREGRESSIVE,
    PARTS,
    TRAINED,
    GlmImageSettings,
    TokenGrids,
    token_grids,
)
from grpo_core.policies.glm_image.sources import SourceEncoder
from grpo_core.policies.pipeline_loading import initial_state_of, offloaded_parts
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained.component import TrainedComponent, use_attention
from grpo_core.policies.trained.lora_and_full import FrozenModel
from grpo_core.policies.trained.model import CPU, TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload, offload_parts
from grpo_core.policies.trained.quantization import refuse_unusable_weights
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import Sources, TokenBatch
from grpo_core.rollouts.images import SourceImage, without_marks
from grpo_core.rollouts.records import (
    ActionLogprobs,
    Entropies,
    GroupRequest,
    RolloutGroup,
    SampledActions,
    SampledTokens,
    StepMeans,
)
from grpo_core.rollouts.streams import ImageSize, Stream


class GlmImageTokens(TrainedComponent[TokenBatch]):
    """The stream of image tokens: a preview grid, then the large grid; of an edit the large grid alone."""

    parts = (AUTOREGRESSIVE,)

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
        self.pipeline, self.offload = pipeline, offload
        self.sources = sources or SourceEncoder(pipeline, offload)
        self.trained, self.autocast = trained, autocast
        self._prompts = RecentlyUsed[EncodedPrompt]()
        self.sample_with(settings)

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings from this call on; InputError for a size that the model cannot generate."""
        self.grids = self.grids_of(settings.size)
        self.settings = settings

    @property
    def max_length(self) -> int:
        """Number of tokens of both grids of an image of the settings' size; an edit has fewer."""
        return self.grids.tokens

    @property
    def vocabulary(self) -> int:
        """Number of image codes: ids [0, vocabulary) are sampled and scored."""
        return int(self._base.config.vq_config.num_embeddings)

    @property
    def blocks(self) -> int:
        """Number of transformer blocks."""
        return int(self._base.config.get_text_config().num_hidden_layers)

    @property
    def _base(self) -> Any:
        return self.pipeline.vision_language_encoder

    def grids_of(self, size: ImageSize, *, edit: bool = False) -> TokenGrids:
        """Return the grids of an image of this size, drawn or edited; InputError if it cannot be generated."""
        grids = token_grids(size, pixel_unit(self.pipeline))
        return grids.of_edit if edit else grids

    def sizes_of(self, tokens: TokenBatch) -> tuple[ImageSize, ...]:
        """Return the size of each row's image."""
        return tokens.sizes or (self.settings.size,) * len(tokens)

    def encode(self, prompts: Sequence[str], sizes: Sequence[ImageSize], sources: Sources | None) -> EncodedPrompts:
        """Encode prompts, each for an image of its size; one that was encoded before is not encoded again."""
        given = zip(prompts, sizes, sources or ((),) * len(prompts), strict=True)
        return pad_prompts([self._encoded(*each) for each in given], self._device)

    def _encoded(self, prompt: str, size: ImageSize, sources: tuple[SourceImage, ...]) -> EncodedPrompt:
        def encode() -> EncodedPrompt:
            codes = [self.sources.codes(source) for source in sources]
            text = without_marks(prompt) if sources else prompt
            return encode_prompt(self._base.model, self.pipeline.processor, text, size, codes)

        return self._prompts.get((prompt, size, tuple(source.digest for source in sources)), encode)

    def sample(
        self,
        prompts: Sequence[str],
        group_size: int,
        seeds: Sequence[int],
        size: ImageSize | None = None,
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other, with a seed each.

        Every prompt has source images, or none has any.
        """
        assert sources is None or all(sources), "an image drawn from text alone has other tokens than an edit"
        size = size or self.settings.size
        rule = SamplingRule(
            vocabulary=self.vocabulary,
            temperature=self.settings.temperature,
            truncation=self.settings,
            ends=(),
            stops=None,
            max_tokens=self.grids_of(size, edit=sources is not None).tokens,
        )
        requested = tuple(prompt for prompt in prompts for _ in range(group_size))
        images = None if sources is None else tuple(each for each in sources for _ in range(group_size))
        step = StaticStep if self.settings.cache_implementation == "static" else DecodeStep
        with self.offload.using(*self.parts):
            encoded = self.encode(prompts, (size,) * len(prompts), sources)
            rows = torch.arange(len(prompts), device=self._device).repeat_interleave(group_size)
            with self._sampling():
                sampled = sample_completions(self._base, encoded, requested, rows, rule, seeds, images, step)
        return replace(
            sampled,
            actions=replace(sampled.actions, sizes=(size,) * len(requested)),
            # The size of an image determines its number of tokens.
            finished=torch.ones(len(requested), dtype=torch.bool),
            max_length=self.max_length,
        )

    def _score(
        self, model: nn.Module, actions: TokenBatch, *, entropy: Entropies, others: StepMeans | None = None
    ) -> ActionLogprobs:
        # `model` is the pipeline's own, whose adapters or values the caller has exchanged.
        assert others is None, "tokens have no means"
        sizes = self.sizes_of(actions)
        edited = [bool(own) for own in actions.sources or ((),) * len(actions)]
        kinds = list(zip(sizes, edited, strict=True))
        for size, edit in dict.fromkeys(kinds):
            alike = actions.select([row for row, own in enumerate(kinds) if own == (size, edit)])
            require_fit(alike, self.grids_of(size, edit=edit), size)
        with self._precision():
            return score_completions(
                self._base,
                self.encode(actions.prompts, sizes, actions.sources),
                actions.token_ids,
                actions.loss_mask,
                vocabulary=self.vocabulary,
                temperature=actions.temperature,
                support=actions.support,
                entropy=entropy,
                whole_logits=False,
            )


class GlmImagePolicy:
    """Both halves of GLM-Image, each trained or frozen; `components` has the trained ones."""

    def __init__(self, tokens: GlmImageTokens, decoder: GlmImageDecoder, trained: Sequence[Stream]) -> None:
        self.tokens, self.decoder, self.offload = tokens, decoder, decoder.offload
        halves: Mapping[Stream, Any] = {"tokens": tokens, "denoising": decoder}
        self.components: Mapping[Stream, PolicyComponent] = {stream: halves[stream] for stream in trained}

    @property
    def settings(self) -> GlmImageSettings:
        """How images are sampled and scored."""
        return self.tokens.settings

    def sample_with(self, settings: GlmImageSettings) -> None:
        """Use these settings from this call on; InputError for a size that the model cannot generate."""
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
        offload: bool = False,
    ) -> "GlmImagePolicy":
        """Load by folder or hub name; a half without a choice is frozen, and a frozen decoder keeps its own dtype."""
        quantization = next((choice.quantization for choice in choices.values()), None)
        trained = [TRAINED[stream] for stream in choices]
        full = [TRAINED[stream] for stream, choice in choices.items() if choice.lora is None]
        refuse_unusable_weights(model, PARTS, quantization, device, trained=trained, adapters=not full)
        offloaded = offloaded_parts(PARTS, full) if offload else ()
        pipeline = load_pipeline(model, dtype=dtype, device=device, quantization=quantization, offloaded=offloaded)
        use_attention(pipeline.vision_language_encoder, attn_implementation)
        halves: dict[Stream, TrainedModel] = {}
        for stream, part in TRAINED.items():
            network, read_again = getattr(pipeline, part), initial_state_of(model, PARTS, part, dtype)
            halves[stream] = FrozenModel(network)
            if choice := choices.get(stream):
                halves[stream] = train_half(stream, network, choice, model, initial_state=read_again)
        mover = offload_parts(pipeline, offloaded, device)
        sources = SourceEncoder(pipeline, mover)
        painting = autocast if "denoising" in choices else None
        return cls(
            GlmImageTokens(pipeline, settings, halves["tokens"], autocast=autocast, sources=sources, offload=mover),
            GlmImageDecoder(pipeline, settings, halves["denoising"], autocast=painting, sources=sources, offload=mover),
            tuple(choices),
        )

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the tokens of all groups at once, then paint group by group."""
        return itertools.starmap(self._painted, sample_drafts(requests, self.tokens.sample))

    def sample_batches(self, batches: Sequence[Sequence[GroupRequest]]) -> Iterator[RolloutGroup]:
        """Sample one batch after the other; with offloaded parts the tokens of all batches come first."""
        if not self.offload.enabled:
            return itertools.chain.from_iterable(map(self.sample, batches))
        drafted = [list(sample_drafts(batch, self.tokens.sample)) for batch in batches]
        return itertools.starmap(self._painted, itertools.chain.from_iterable(drafted))

    def _painted(self, request: GroupRequest, drafts: SampledTokens) -> RolloutGroup:
        (painted,) = self.decoder.sample(
            [request],
            drafts.actions,
            size=request.size or self.settings.size,
            rows_per_call=self.settings.decode_batch_size,
        )
        sampled: Mapping[Stream, SampledActions | None] = {"tokens": drafts, "denoising": painted.sampled}
        streams = {stream: actions for stream, actions in sampled.items() if actions is not None}
        return RolloutGroup(request, streams, painted.images)
