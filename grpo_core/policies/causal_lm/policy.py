"""Causal language models behind the Policy protocol. Templates and end tokens are known only in this package."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.decode_steps import ModelStep, StaticStep
from grpo_core.policies.causal_lm.ends import StopTexts, end_tokens
from grpo_core.policies.causal_lm.loading import CAUSAL_LM, ModelKind, load_trained, read_context, vocabulary_size
from grpo_core.policies.causal_lm.prompts import answer_start, encode_prompt, uses_template
from grpo_core.policies.causal_lm.sampling_scoring import (
    head_gives_logits,
    sample_completions,
    score_completions,
)
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.causal_lm.shared_prompts import SharedPrompts
from grpo_core.policies.causal_lm.written import SamplingRule
from grpo_core.policies.drafts import sample_drafts
from grpo_core.policies.encoded_prompts import EncodedPrompt, EncodedPrompts, RecentlyUsed, pad_prompts
from grpo_core.policies.microbatches import (
    PASS_POSITIONS,
    computed_positions,
    sharing_prompts,
    similar_lengths,
)
from grpo_core.policies.trained.component import TrainedComponent, refuse_unscaled_float16
from grpo_core.policies.trained.model import CPU, TrainedModel
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import Sources, TokenBatch, completion_lengths
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.ragged import RaggedRows, RaggedTokens
from grpo_core.rollouts.records import (
    ActionLogprobs,
    Entropies,
    GroupRequest,
    RolloutGroup,
    SampledTokens,
    StepMeans,
)
from grpo_core.rollouts.streams import ImageSize, Stream

if TYPE_CHECKING:
    from grpo_core.policies.engines.vllm import VllmEngine


class CausalLMPolicy(TrainedComponent[TokenBatch]):
    """A text model that answers prompts; it is its only component.

    Ids [0, vocabulary), except the forbidden ones, can be sampled, by the engine or by this model, token by token.
    """

    kind: ClassVar[ModelKind] = CAUSAL_LM
    forbidden: Tensor | None = None
    engine: "VllmEngine | None" = None

    def __init__(
        self,
        trained: TrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: CausalLMSettings,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.trained, self.tokenizer, self.autocast = trained, tokenizer, autocast
        self._prompts = RecentlyUsed[EncodedPrompt]()
        self.vocabulary = vocabulary_size(self._model, tokenizer)
        self.context = read_context(self._model.config)
        self.ends = tuple(token for token in end_tokens(self._model, tokenizer) if token < self.vocabulary)
        # Without weights nothing is scored.
        self.whole_logits = self._has_weights and not head_gives_logits(self._model)
        self.pass_positions = PASS_POSITIONS.get(self._device.type, 0)
        self.sample_with(settings)

    @classmethod
    def load(
        cls,
        model: str,
        settings: CausalLMSettings,
        choices: Mapping[Stream, TrainingChoice],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        autocast: torch.dtype | None = None,
        attn_implementation: str | None = None,
        offload: bool = False,
    ) -> Self:
        """Load by folder or hub name; on the meta device without weights, to sample with an engine that has its own."""
        refuse_unscaled_float16(dtype, autocast)
        reader = cls.kind.load_reader(model)
        trained = load_trained(
            model,
            cls.kind,
            choices["tokens"],
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
        )
        return cls(trained, reader, settings, autocast=autocast)

    def sample_with(self, settings: CausalLMSettings) -> None:
        """Use these settings for sampling, rendering and reading prompts from this call on."""
        uses_template(self.tokenizer, settings)
        self.settings = settings
        self.stops = StopTexts(self.tokenizer, settings.stop)

    @property
    def answer_start(self) -> str:
        """How the chat template begins every answer with the current settings; empty where it does not."""
        return answer_start(self.tokenizer, self.settings)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row with the current settings."""
        return self.settings.max_completion_length

    @property
    def blocks(self) -> int:
        """Number of transformer blocks."""
        return int(self._model.config.get_text_config().num_hidden_layers)

    @property
    def _model(self) -> Any:
        return _unwrapped(self.trained.model)

    @property
    def _has_weights(self) -> bool:
        return super()._device.type != "meta"

    @property
    def _device(self) -> torch.device:
        return super()._device if self._has_weights else CPU

    @property
    def image_arguments(self) -> Mapping[str, Any] | None:
        """Arguments of the image processor with the current settings; None: the model reads no images."""
        return None

    @property
    def _completion_type(self) -> int:
        return 0

    def _encode_prompt(self, prompt: str, images: Sequence[SourceImage]) -> EncodedPrompt:
        if images:
            raise InputError("prompt", prompt, "A model of texts does not see images; use policy.kind vision_lm.")
        return encode_prompt(self.tokenizer, self.settings, prompt, context=self.context)

    def _with_features(self, key: Hashable, prompt: EncodedPrompt) -> EncodedPrompt:
        """Add positions and features of a prompt's images where they are not kept under this key."""
        return prompt

    def encode(
        self, prompts: Sequence[str], sources: Sequence[Sequence[SourceImage]] = (), *, for_engine: bool = False
    ) -> EncodedPrompts:
        """Encode prompts with their images; each is encoded once under the current settings.

        An engine reads images itself, so positions and features are left out for it.
        """
        found = []
        for prompt, images in zip(prompts, sources or ((),) * len(prompts), strict=True):
            key = (prompt, tuple(image.digest for image in images), self.settings)
            encoded = self._prompts.get(key, partial(self._encode_prompt, prompt, images))
            found.append(encoded if for_engine else self._with_features(key, encoded))
        return pad_prompts(found, self._device, completion_type=self._completion_type)

    def plain_logits(self, prompt: str, sources: Sequence[SourceImage], written: Tensor) -> Tensor:
        """Return logits [time, ids] of the ids written after a prompt, of one forward pass over this row alone.

        It is given neither a mask nor positions, nor features of images in place of their pixels.
        """
        ids = torch.cat([self.encode([prompt], [sources], for_engine=True).input_ids[0], written.to(self._device)])
        with self._precision():
            logits: Tensor = self._model(input_ids=ids.unsqueeze(0)).logits
        return logits[0, -len(written) - 1 : -1]

    def _distinct(
        self, prompts: Sequence[str], sources: Sources | None, *, for_engine: bool = False
    ) -> tuple[EncodedPrompts, Tensor]:
        """Encode the distinct prompts with their images, and return the index of each given one, on the CPU."""
        given = list(zip(prompts, sources or ((),) * len(prompts), strict=True))
        places = {each: index for index, each in enumerate(dict.fromkeys(given))}
        rows = torch.tensor([places[each] for each in given])
        distinct, images = [prompt for prompt, _ in places], [images for _, images in places]
        return self.encode(distinct, images, for_engine=for_engine), rows

    @property
    def components(self) -> Mapping[Stream, "CausalLMPolicy"]:
        """The model itself, whose actions are tokens."""
        return {"tokens": self}

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the completions of all groups at once."""
        for request, drafts in sample_drafts(requests, self.sample_tokens):
            yield RolloutGroup(request, {"tokens": drafts}, tuple(self.decode(drafts.actions)))

    def sample_batches(self, batches: Sequence[Sequence[GroupRequest]]) -> Iterator[RolloutGroup]:
        """Sample one batch after the other."""
        return itertools.chain.from_iterable(map(self.sample, batches))

    def sample_tokens(
        self,
        prompts: Sequence[str],
        group_size: int,
        seeds: Sequence[int],
        size: ImageSize | None = None,
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other, with a seed each."""
        assert size is None, "texts have no size"
        settings = self.settings
        requested = tuple(prompt for prompt in prompts for _ in range(group_size))
        images = None if sources is None else tuple(each for each in sources for _ in range(group_size))
        rule = SamplingRule(
            vocabulary=self.vocabulary,
            temperature=settings.temperature,
            truncation=settings,
            ends=self.ends,
            stops=self.stops,
            max_tokens=settings.max_completion_length,
            forbidden=self.forbidden,
            width=self._model.get_input_embeddings().weight.shape[0],
        )
        step = StaticStep if settings.cache_implementation == "static" else ModelStep
        sample = self.engine or partial(sample_completions, self._model, step_by_step=step)
        with torch.no_grad(), self._sampling():
            encoded, rows = self._distinct(requested, images, for_engine=self.engine is not None)
            return sample(encoded, requested, rows.to(self._device), rule, seeds, images)

    def decode(self, tokens: TokenBatch) -> list[str]:
        """Return the completions as texts, without special tokens, and cut before the first stop text."""
        texts = []
        for ids, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True):
            written = ids[mask].tolist()
            if written and written[-1] in self.ends:
                written = written[:-1]
            texts.append(self.stops.visible(written))
        return texts

    def microbatches(self, rows: RaggedRows, indices: Sequence[int], size: int) -> list[list[int]]:
        """Cut rows into microbatches by length; where prompts are shared, by prompt if that is less to compute."""
        actions, known = rows.actions, rows.prompt_lengths
        if not self.trained.shares_prompts or known is None:
            return super().microbatches(rows, indices, size)
        assert isinstance(actions, RaggedTokens), "a component has its own kind of actions"
        sources = actions.sources or ((),) * len(actions)
        prompts = [(actions.prompts[row], sources[row]) for row in indices]
        return sharing_prompts(rows.lengths(indices), prompts, known[indices].tolist(), size, self.pass_positions)

    def _shared(self, encoded: EncodedPrompts, rows: Tensor, actions: TokenBatch) -> SharedPrompts | None:
        """Return how rows share the encoded prompts; None if they do not, or if that would be more to compute."""
        prompts = len(encoded.input_ids)
        if not self.trained.shares_prompts or prompts == len(rows):
            return None
        lengths = completion_lengths(actions.loss_mask).tolist()
        whole, shared = computed_positions(lengths, prompts, encoded.length, self.pass_positions)
        return SharedPrompts(rows, similar_lengths(lengths, self.pass_positions)) if shared < whole else None

    def _score(
        self, model: nn.Module, actions: TokenBatch, *, entropy: Entropies, others: StepMeans | None = None
    ) -> ActionLogprobs:
        assert others is None, "tokens have no means"
        with self._precision():
            encoded, rows = self._distinct(actions.prompts, actions.sources)
            shared = self._shared(encoded, rows, actions)
            return score_completions(
                _unwrapped(model),
                encoded.select(rows) if shared is None else encoded,
                actions.token_ids,
                actions.loss_mask,
                vocabulary=self.vocabulary,
                temperature=actions.temperature,
                support=actions.support,
                entropy=entropy,
                whole_logits=self.whole_logits,
                forbidden=self.forbidden,
                shared=shared,
            )


def _unwrapped(model: nn.Module) -> Any:
    """Return the language model inside peft's wrapper; adapters are in its layers."""
    # Asked of the model: importing peft to compare classes takes seconds, and full weights need none of it.
    wrapped = getattr(model, "get_base_model", None)
    return model if wrapped is None else wrapped()
