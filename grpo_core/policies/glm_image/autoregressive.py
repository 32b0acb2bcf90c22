"""The token model: prompts -> ids and positions, the sampling loop, and log-probs of stored tokens.

The model's own forward pass rebuilds the attention mask and the rotary embedding for each token, which takes as long as
two layers of a small model. Here the layers are called themselves, and so are their adapters and hooks.

Positions are given to the model explicitly, always. GLM-Image keeps position state on the module between a prefill and
its decode steps; a forward pass without `position_ids` reads the state of the previous caller, and the log-probs are
wrong by nats without a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GlmImageForConditionalGeneration, GlmImageProcessor
from transformers.masking_utils import create_causal_mask

from grpo_core.actions import TokenSupport
from grpo_core.errors import InputError
from grpo_core.logprobs import Head, gather_logprobs, score_hidden, vocabulary_logprobs
from grpo_core.policies.kv_cache import grow_in_place
from grpo_core.records import ActionLogprobs, Entropies
from grpo_core.sampling import SupportRecorder, draw_tokens, truncate, uniform_numbers
from grpo_core.settings import Truncation
from grpo_core.streams import ImageSize


class DecodeStep:
    """Maps the last token of every row to the logits of the next."""

    def __init__(
        self,
        model: GlmImageForConditionalGeneration,
        cache: Cache,
        attention_mask: Int[Tensor, "rows total"],
        position_ids: Int[Tensor, "3 rows time"],
    ) -> None:
        """Prepare mask and rotary embedding.

        Args:
            model: without peft's wrapper; adapters are in its layers.
            cache: holds the keys and values of the prompts; each step adds those of one token.
            attention_mask: 0 for left padding, else 1, of the prompts and of all tokens to come.
            position_ids: (time, height, width) of the tokens to come.
        """
        self._text, self._head, self._cache = model.model.language_model, model.lm_head, cache
        self._embed = model.get_input_embeddings()
        example = self._embed.weight.new_empty(0)
        cosines, sines = self._text.rotary_emb(example, position_ids)
        self._rotations = list(zip(cosines.split(1, 1), sines.split(1, 1), strict=True))
        self._padding = None if attention_mask.all() else attention_mask
        self._mask: Tensor | None = None
        if self._padding is not None and self._text.config._attn_implementation in ("sdpa", "eager"):
            added = torch.zeros(attention_mask.shape, dtype=example.dtype, device=example.device)
            self._mask = added.masked_fill(attention_mask == 0, -torch.inf)[:, None, None]

    def __call__(self, ids: Int[Tensor, " rows"], index: int) -> Float[Tensor, "rows vocab"]:
        """Return the logits that follow the token at `index`."""
        hidden = self._embed(ids.unsqueeze(1))
        mask = self._mask_for(hidden)
        for layer in self._text.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=self._rotations[index],
                past_key_values=self._cache,
                use_cache=True,
            )
        logits: Tensor = self._head(self._text.norm(hidden))
        return logits[:, -1]

    def _mask_for(self, hidden: Float[Tensor, "rows 1 dim"]) -> Any:
        """Return the mask in the form of the model's attention; None where no row is padded."""
        if self._padding is None:
            return None
        length = self._cache.get_seq_length() + 1
        if self._mask is not None:
            return self._mask[..., :length]
        return create_causal_mask(self._text.config, hidden, self._padding[:, :length], self._cache)


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts encoded for the autoregressive model, left-padded to one length.

    Attributes:
        input_ids: ids of source images, each between its start and end token, and of the prompt, with the grid tags and
            the image's start token.
        attention_mask: 1 for a prompt id, 0 for left padding.
        position_ids: (time, height, width) position of every prompt id, of every token of the grids in the
            order they are sampled, and of the end slot.
    """

    input_ids: Int[Tensor, "prompts length"]
    attention_mask: Int[Tensor, "prompts length"]
    position_ids: Int[Tensor, "3 prompts total"]

    @property
    def length(self) -> int:
        """Number of ids of the padded prompt."""
        return self.input_ids.shape[1]

    def select(self, rows: Int[Tensor, " rows"]) -> "EncodedPrompts":
        """Return these prompts, in this order, repetitions allowed."""
        return EncodedPrompts(self.input_ids[rows], self.attention_mask[rows], self.position_ids[:, rows])

    @classmethod
    def join(cls, parts: Sequence["EncodedPrompts"]) -> "EncodedPrompts":
        """Return the prompts of all parts, whose grids may differ, with padding on both sides of the positions.

        What is padding has no attention, so its positions do not matter.
        """
        length = max(part.length for part in parts)
        grids = max(part.position_ids.shape[2] - part.length for part in parts)

        def filled(values: Tensor, part: EncodedPrompts, right: int = 0) -> Tensor:
            return nn.functional.pad(values, (length - part.length, right))

        return cls(
            torch.cat([filled(part.input_ids, part) for part in parts]),
            torch.cat([filled(part.attention_mask, part) for part in parts]),
            torch.cat(
                [filled(part.position_ids, part, grids + part.length - part.position_ids.shape[2]) for part in parts], 1
            ),
        )


def refuse_reserved_tokens(processor: GlmImageProcessor, prompt: str) -> None:
    """Raise InputError if a prompt contains a tag that the tokenizer reads as an image or grid token."""
    tokenizer = processor.tokenizer
    reserved = {*tokenizer.all_special_tokens, processor.image_token, processor.grid_bos_token, "<|dit_token_"}
    for token in sorted(reserved):
        if token and token in prompt:
            raise InputError("prompt", prompt, f"Remove {token!r}: the model reads it as structure, not as text.")


Codes = Int[Tensor, "_ _"]
"""The ids of a source image in its rows and columns, which the vision tower and its quantizer give it."""


def encode_prompts(
    model: Any,
    processor: GlmImageProcessor,
    prompts: Sequence[str],
    size: ImageSize,
    sources: Sequence[Sequence[Codes]] = (),
) -> EncodedPrompts:
    """Encode distinct prompts for one image size.

    Args:
        model: the inner GlmImageModel, which computes the positions.
        processor: the pipeline's processor.
        prompts: at least one.
        sources: codes of the source images of each prompt, at least one each; empty where no prompt has any.

    Raises:
        InputError: a prompt contains a reserved tag.
    """
    for prompt in prompts:
        refuse_reserved_tokens(processor, prompt)
    if sources:
        inputs = _edit_inputs(processor, prompts, size, sources)
    else:
        messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
        inputs = processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": True, "target_h": size.height, "target_w": size.width, "return_tensors": "pt"},
        )
    device = next(model.parameters()).device
    ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
    with torch.no_grad():
        prompt_positions, _ = model.get_rope_index(
            ids,
            image_grid_thw=inputs["image_grid_thw"].to(device),
            images_per_sample=inputs["images_per_sample"].to(device),
            attention_mask=mask,
        )
    grid_positions = model._cached_decode_position_ids.permute(1, 0, 2)
    model.rope_deltas = model._cached_decode_position_ids = model._prefill_len = None
    return EncodedPrompts(ids, mask, torch.cat([prompt_positions, grid_positions.to(prompt_positions.dtype)], -1))


def _edit_inputs(
    processor: GlmImageProcessor, prompts: Sequence[str], size: ImageSize, sources: Sequence[Sequence[Codes]]
) -> dict[str, Tensor]:
    """Return what the processor gives for prompts with images, except that the codes are in their places already.

    The processor itself takes pixels, which the model would encode in every pass.
    """
    texts, grids = [], []
    rows, columns, *_ = processor._get_target_shape(size.height, size.width)
    tags = f"{processor.grid_bos_token}{rows} {columns}{processor.grid_eos_token}{processor.bos_token}"
    for prompt, codes in zip(prompts, sources, strict=True):
        content = [*({"type": "image"} for _ in codes), {"type": "text", "text": prompt}]
        # The template writes one mark per image.
        start, *others = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False).split(
            processor.image_token
        )
        marked = (processor.image_token * each.numel() + text for each, text in zip(codes, others, strict=True))
        texts.append(start + "".join(marked) + tags)
        grids += [*([1, *each.shape] for each in codes), [1, rows, columns]]
    inputs = dict(processor.tokenizer(texts, padding=True, return_tensors="pt"))
    ids, flat = inputs["input_ids"], torch.cat([each.flatten().cpu() for codes in sources for each in codes])
    return {
        **inputs,
        "input_ids": ids.masked_scatter(ids == processor.image_token_id, flat.to(ids.dtype)),
        "image_grid_thw": torch.tensor(grids),
        "images_per_sample": torch.tensor([len(codes) + 1 for codes in sources]),
    }


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    encoded: EncodedPrompts,
    *,
    group_size: int,
    tokens: int,
    seeds: Sequence[int],
    vocabulary: int,
    temperature: float,
    truncation: Truncation,
) -> tuple[Int[Tensor, "samples time"], Float[Tensor, "samples time"], TokenSupport | None]:
    """Sample the grids of every image, without the end slot.

    Args:
        model: GlmImageForConditionalGeneration, bare or wrapped by peft.
        seeds: one per image, siblings next to each other.
        vocabulary: ids [0, vocabulary) are image codes; no other id is ever sampled.

    Returns:
        Sampled ids, their log-probs, and the ids each could be sampled from; None without truncation.
    """
    logits, cache = _prefill(model, encoded, group_size)
    grow_in_place(cache, encoded.length + tokens)
    prompts = torch.arange(len(encoded.input_ids), device=encoded.input_ids.device)
    encoded = encoded.select(prompts.repeat_interleave(group_size))
    attention = nn.functional.pad(encoded.attention_mask, (0, tokens), value=1)
    step = DecodeStep(_unwrapped(model), cache, attention, encoded.position_ids[:, :, encoded.length :])
    uniforms = uniform_numbers(seeds, tokens).to(logits.device)
    ids = encoded.input_ids.new_zeros(len(seeds), tokens)
    logprobs = torch.zeros(len(seeds), tokens, device=logits.device)
    recorder = SupportRecorder(len(seeds)) if truncation.truncates else None
    for index in range(tokens):
        distribution = truncate(vocabulary_logprobs(logits, vocabulary, temperature), truncation)
        ids[:, index] = draw_tokens(distribution, uniforms[:, index])
        logprobs[:, index] = gather_logprobs(distribution, ids[:, index])
        if recorder:
            recorder.add(distribution, range(len(seeds)))
        if index + 1 < tokens:
            logits = step(ids[:, index], index)
    return ids, logprobs, recorder.support() if recorder else None


def _prefill(
    model: nn.Module, encoded: EncodedPrompts, group_size: int
) -> tuple[Float[Tensor, "samples vocab"], Cache]:
    """Run each prompt once; return its last logits and its cache, repeated for each sibling."""
    cache = DynamicCache()
    output = model(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids[:, :, : encoded.length],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(group_size)
    return output.logits[:, -1].repeat_interleave(group_size, 0), cache


def _unwrapped(model: nn.Module) -> GlmImageForConditionalGeneration:
    return next(part for part in model.modules() if isinstance(part, GlmImageForConditionalGeneration))


def score_tokens(
    model: nn.Module,
    encoded: EncodedPrompts,
    token_ids: Int[Tensor, "samples time"],
    loss_mask: Bool[Tensor, "samples time"],
    *,
    vocabulary: int,
    temperature: float,
    support: TokenSupport | None = None,
    entropy: Entropies = "constant",
) -> ActionLogprobs:
    """Compute log-probs of stored tokens with the positions, padding, ids and temperature of their sampling.

    Args:
        model: GlmImageForConditionalGeneration, bare or wrapped.
        token_ids: both grids, preview first, or an edit's one; a short grid is padded on the right, with any ids.
        support: the ids each token was sampled from; None without truncation.
        entropy: whether entropies are computed too.
    """
    # The padding of a short grid may be the end token, which is not an image code.
    token_ids = torch.where(loss_mask, token_ids, 0)
    ids = torch.cat([encoded.input_ids, token_ids[:, :-1]], 1)
    attention = torch.cat([encoded.attention_mask, loss_mask[:, :-1].to(encoded.attention_mask.dtype)], 1)
    inner = _unwrapped(model)
    hidden = _hidden_states(
        model,
        inner,
        input_ids=ids,
        attention_mask=attention,
        position_ids=encoded.position_ids[:, :, : ids.shape[1]],
    )
    return score_hidden(
        hidden[:, encoded.length - 1 :],
        _head(inner, vocabulary),
        token_ids,
        loss_mask,
        vocabulary=vocabulary,
        temperature=temperature,
        support=support,
        entropy=entropy,
    )


def _hidden_states(
    model: nn.Module, inner: GlmImageForConditionalGeneration, **inputs: Tensor
) -> Float[Tensor, "samples length hidden"]:
    """Return the input of the output head."""
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: object, output: Any) -> None:
        caught.append(output.last_hidden_state)

    handle = inner.model.register_forward_hook(catch)
    nothing = torch.zeros(0, dtype=torch.long, device=inputs["input_ids"].device)
    try:
        # Through the outermost module: wrappers that shard weights or reduce gradients act on its forward pass.
        model(**inputs, use_cache=False, logits_to_keep=nothing)
    finally:
        handle.remove()
    return caught[0]


def _head(inner: GlmImageForConditionalGeneration, vocabulary: int) -> Head:
    """Return the function from hidden states to the logits of the first `vocabulary` ids."""
    head: nn.Linear = inner.lm_head
    # A subclass has adapters or shards, so its weight alone does not give the logits.
    if type(head) is not nn.Linear:
        return head
    # Cut once: if cut for each chunk, the gradient would be padded to the full weight each time.
    weight = head.weight[:vocabulary]
    return lambda states: nn.functional.linear(states, weight)
