"""The autoregressive loop: one prefill per prompt, a cache shared by the group, one random number per token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.policies.glm_image.prompts import EncodedPrompts
from grpo_core.records import TokenSupport
from grpo_core.sampling import SupportRecorder, Truncation, draw_tokens, truncate, uniform_numbers


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
    """Sample both grids of every image, without the end slot.

    Args:
        model: GlmImageForConditionalGeneration, bare or wrapped by peft.
        encoded: one row per prompt.
        group_size: images per prompt.
        tokens: number of ids to sample per image.
        seeds: one per image, siblings next to each other.
        vocabulary: ids [0, vocabulary) are image codes; no other id is ever sampled.
        temperature: divides the logits.
        truncation: which of the codes can be sampled.

    Returns:
        Sampled ids, their log-probs, and the ids each could be sampled from; None without truncation.
    """
    logits, cache = _prefill(model, encoded, group_size)
    rows = encoded.repeat(group_size)
    attention = torch.cat([rows.attention_mask, rows.attention_mask.new_ones(len(seeds), tokens)], 1)
    uniforms = uniform_numbers(seeds, tokens).to(logits.device)
    ids = rows.input_ids.new_zeros(len(seeds), tokens)
    logprobs = torch.zeros(len(seeds), tokens, device=logits.device)
    recorder = SupportRecorder() if truncation.active else None
    for index in range(tokens):
        distribution = truncate(vocabulary_logprobs(logits, vocabulary, temperature), truncation)
        ids[:, index] = draw_tokens(distribution, uniforms[:, index])
        logprobs[:, index] = gather_logprobs(distribution, ids[:, index])
        if recorder:
            recorder.add(distribution)
        if index + 1 == tokens:
            break
        place = encoded.length + index
        logits = model(
            input_ids=ids[:, index : index + 1],
            attention_mask=attention[:, : place + 1],
            position_ids=rows.position_ids[:, :, place : place + 1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return ids, logprobs, recorder.support() if recorder else None


def _prefill(
    model: nn.Module, encoded: EncodedPrompts, group_size: int
) -> tuple[Float[Tensor, "samples vocab"], DynamicCache]:
    """Run each prompt once; return its last logits and its cache, repeated for each sibling."""
    cache = DynamicCache()
    step = model(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids[:, :, : encoded.length],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(group_size)
    return step.logits[:, -1].repeat_interleave(group_size, 0), cache
