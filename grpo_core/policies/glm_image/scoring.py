"""Teacher-forced log-probs: one forward pass over prompt and stored tokens, logits only for scored tokens."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GlmImageForConditionalGeneration

from grpo_core.logprobs import Head, score_hidden
from grpo_core.policies.glm_image.prompts import EncodedPrompts
from grpo_core.records import TokenLogprobs, TokenSupport


def score_tokens(
    model: nn.Module,
    encoded: EncodedPrompts,
    token_ids: Int[Tensor, "samples time"],
    loss_mask: Bool[Tensor, "samples time"],
    *,
    vocabulary: int,
    temperature: float,
    support: TokenSupport | None = None,
    entropy: bool = True,
) -> TokenLogprobs:
    """Compute log-probs of stored tokens with the positions, padding, ids and temperature of their sampling.

    Args:
        model: GlmImageForConditionalGeneration, bare or wrapped.
        encoded: one row per sample.
        token_ids: both grids, preview first; a short grid is padded on the right, with any ids.
        loss_mask: False over the padding of a short grid.
        vocabulary: ids [0, vocabulary) could be sampled.
        temperature: divides the logits.
        support: the ids each token was sampled from; None without truncation.
        entropy: compute entropies too, with gradients.
    """
    # The padding of a short grid may be the end token, which is not an image code.
    token_ids = torch.where(loss_mask, token_ids, 0)
    ids = torch.cat([encoded.input_ids, token_ids[:, :-1]], 1)
    attention = torch.cat([encoded.attention_mask, loss_mask[:, :-1].to(encoded.attention_mask.dtype)], 1)
    inner = next(part for part in model.modules() if isinstance(part, GlmImageForConditionalGeneration))
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
