"""GLM-Image behind the Policy protocol: a token model that writes an image, and a decoder that paints it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import nn

from grpo_core.actions import Sources, TokenBatch
from grpo_core.images import SourceImage, without_marks
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.glm_image.autoregressive import EncodedPrompts, encode_prompts, sample_tokens, score_tokens
from grpo_core.policies.glm_image.decoding import GlmImageDecoder, require_fit
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit, train_half
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
from grpo_core.records import ActionLogprobs, Entropies, GroupRequest, RolloutGroup, SampledActions, SampledTokens
from grpo_core.streams import ImageSize, Stream


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
        """Combine the parts.

        Args:
            trained: the pipeline's autoregressive model, or the frozen one where only the decoder is trained.
            sources: encodes source images; None: one of its own.
        """
        self.pipeline, self.offload = pipeline, offload
        self.sources = sources or SourceEncoder(pipeline, offload)
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

    def _encode(self, prompts: Sequence[str], size: ImageSize, sources: Sources | None = None) -> EncodedPrompts:
        """Encode prompts for one size; all of them have source images, or none has."""
        model, processor = self._base.model, self.pipeline.processor
        if sources is None:
            return encode_prompts(model, processor, prompts, size)
        codes = [[self.sources.codes(source) for source in own] for own in sources]
        return encode_prompts(model, processor, [without_marks(prompt) for prompt in prompts], size, codes)

    def _encode_rows(self, tokens: TokenBatch) -> EncodedPrompts:
        """Encode the prompt of each row for the size of its image; each distinct combination is encoded once."""
        sources = tokens.sources or ((),) * len(tokens)
        inputs = list(zip(self.sizes_of(tokens), tokens.prompts, sources, strict=True))
        # The processor reads prompts of one size at a time, all with source images or all without.
        alike: dict[tuple[ImageSize, bool], dict[tuple[str, tuple[SourceImage, ...]], None]] = {}
        for size, prompt, own in inputs:
            alike.setdefault((size, bool(own)), {})[prompt, own] = None
        distinct = ((size, prompt, own) for (size, _), prompts in alike.items() for prompt, own in prompts)
        place = {each: index for index, each in enumerate(distinct)}
        rows = torch.tensor([place[each] for each in inputs], device=self._device)
        encoded = [
            self._encode([prompt for prompt, _ in pairs], size, tuple(own for _, own in pairs) if edited else None)
            for (size, edited), pairs in alike.items()
        ]
        return EncodedPrompts.join(encoded).select(rows)

    def sample(
        self,
        prompts: Sequence[str],
        group_size: int,
        seeds: Sequence[int],
        size: ImageSize | None = None,
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other.

        Args:
            seeds: len(prompts) * group_size seeds, one per sequence.
            size: of the images; None: that of the settings.
            sources: the source images of each prompt, at least one each; None: no prompt has any.
        """
        assert sources is None or all(sources), "an image drawn from text alone has other tokens than an edit"
        size = size or self.settings.size
        with self.offload.using(*self.parts):
            encoded = self._encode(list(prompts), size, sources)
            with self._sampling():
                ids, logprobs, support = sample_tokens(
                    self.trained.model,
                    encoded,
                    group_size=group_size,
                    tokens=self.grids_of(size, edit=sources is not None).tokens,
                    seeds=seeds,
                    vocabulary=self.vocabulary,
                    temperature=self.settings.temperature,
                    truncation=self.settings,
                )
        rows = tuple(prompt for prompt in prompts for _ in range(group_size))
        mask = torch.ones(ids.shape, dtype=torch.bool)
        own = None if sources is None else tuple(each for each in sources for _ in range(group_size))
        tokens = TokenBatch(rows, ids.cpu(), mask, self.settings.temperature, support, (size,) * len(rows), own)
        lengths = encoded.attention_mask.sum(-1).repeat_interleave(group_size).cpu()
        # The size of an image determines its number of tokens.
        finished = torch.ones(len(rows), dtype=torch.bool)
        return SampledTokens(tokens, logprobs.cpu(), finished, self.max_length, lengths)

    def _score(self, model: nn.Module, actions: TokenBatch, *, entropy: Entropies, kl: bool = False) -> ActionLogprobs:
        assert not kl, "the KL over image codes is estimated from log-probs"
        edited = [bool(own) for own in actions.sources or ((),) * len(actions)]
        kinds = list(zip(self.sizes_of(actions), edited, strict=True))
        for size, edit in dict.fromkeys(kinds):
            alike = actions.select([row for row, own in enumerate(kinds) if own == (size, edit)])
            require_fit(alike, self.grids_of(size, edit=edit), size)
        device = self._device
        with self._precision():
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
        self.tokens, self.decoder, self.offload = tokens, decoder, decoder.offload
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
        offload: bool = False,
    ) -> "GlmImagePolicy":
        """Load by folder or hub name.

        Args:
            choices: what of each half is trained; a half without a choice is frozen.
            autocast: of the trained halves; a frozen decoder computes in its own dtype.
            attn_implementation: of the token model.

        Raises:
            InputError: no such model, a size the model cannot generate, or adapter targets that match nothing.
        """
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
