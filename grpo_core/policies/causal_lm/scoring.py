"""Teacher-forced log-probs: one forward pass over prompt and stored completion, logits in chunks of tokens."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo_core.logprobs import score_hidden
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.records import ActionLogprobs, Entropies, TokenSupport

_PROBE_LOGIT = 100.0


def score_completions(
    model: Any,
    encoded: EncodedPrompts,
    token_ids: Int[Tensor, "rows time"],
    loss_mask: Bool[Tensor, "rows time"],
    *,
    vocabulary: int,
    temperature: float,
    support: TokenSupport | None,
    entropy: Entropies,
    whole_logits: bool,
) -> ActionLogprobs:
    """Compute log-probs of stored tokens with the positions, padding, support and temperature of their sampling.

    Args:
        encoded: one row per sample.
        token_ids: padded on the right.
        support: the ids each token was sampled from; None without truncation.
        entropy: whether entropies are computed too.
        whole_logits: take the logits from the model, because its head does not give them (`head_gives_logits`).
    """
    time = token_ids.shape[1]
    inputs = _inputs(encoded, token_ids[:, :-1], loss_mask[:, :-1])
    if whole_logits:
        # One more position than `time` is requested: the slice keeps the last `time` of them.
        states, head = model(**inputs, use_cache=False, logits_to_keep=time).logits, _unchanged
    else:
        states = model.base_model(**inputs, use_cache=False).last_hidden_state[:, encoded.length - 1 :]
        head = model.get_output_embeddings()
    if states.ndim != 3 or states.shape[:2] != token_ids.shape:
        # Of a model that predicts several tokens at each place.
        raise ValueError(f"the model returned {list(states.shape)} for {list(token_ids.shape)} tokens")
    return score_hidden(
        states,
        head,
        token_ids,
        loss_mask,
        vocabulary=vocabulary,
        temperature=temperature,
        support=support,
        entropy=entropy,
    )


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _inputs(
    encoded: EncodedPrompts, token_ids: Int[Tensor, "rows fed"], loss_mask: Bool[Tensor, "rows fed"]
) -> dict[str, Tensor]:
    """Join prompts with the completions' tokens, each with its position."""
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    positions = encoded.lengths.unsqueeze(-1) + places
    return {
        "input_ids": torch.cat([encoded.input_ids, torch.where(loss_mask, token_ids, 0)], 1),
        "attention_mask": torch.cat([encoded.attention_mask, loss_mask.to(encoded.attention_mask.dtype)], 1),
        "position_ids": torch.cat([encoded.position_ids, torch.where(loss_mask, positions, 0)], 1),
    }


@torch.no_grad()
def head_gives_logits(model: Any) -> bool:
    """Return whether the model's logits are its head's output for its last hidden states, without further operations.

    Some models cap or scale the head's output (Gemma 2's soft cap, Granite's and Cohere's scale): their logits must
    come from the model itself. Small logits would hide a cap, so the head's input is scaled up to logits of about 100
    for this one comparison.
    """
    head, body = model.get_output_embeddings(), model.base_model
    # A model without a body of its own returns no hidden states.
    if head is None or body is model:
        return False
    seen: dict[str, Tensor] = {}

    def before(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        seen["input"] = inputs[0]
        # Called past its hooks, of which this is one.
        largest = head.forward(inputs[0]).abs().amax().clamp(min=1e-6)
        return (inputs[0] * (_PROBE_LOGIT / largest),)

    def after(_: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        seen["output"] = output

    ids = torch.arange(4, device=model.device).unsqueeze(0)
    hooks = head.register_forward_pre_hook(before), head.register_forward_hook(after)
    try:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids, "use_cache": False}
        returned = model(**inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    if "output" not in seen:
        return False
    hidden = body(**inputs).last_hidden_state
    # A head of several layers has another input.
    same_input = hidden.shape == seen["input"].shape and torch.allclose(seen["input"], hidden)
    return same_input and torch.allclose(returned.float(), seen["output"].float())
