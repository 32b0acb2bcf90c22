"""Sample completions token by token, and compute the log-probs of stored ones in one teacher-forced pass.

A completion ends at an end token, or at the token that completes a stop text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from grpo_core.logprobs import score_hidden
from grpo_core.policies.causal_lm.decode_steps import ModelStep, unread_padding, without_router_losses
from grpo_core.policies.causal_lm.shared_prompts import SharedPrompts, shared_states
from grpo_core.policies.causal_lm.written import SamplingRule, Written
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.rollouts.actions import Sources, TokenSupport, completion_lengths
from grpo_core.rollouts.records import ActionLogprobs, Entropies, SampledTokens
from grpo_core.sampling import TOKENS_PER_LOOK, uniform_numbers
from grpo_core.transfers import to_device


@torch.no_grad()
def sample_completions(
    model: Any,
    encoded: EncodedPrompts,
    prompts: tuple[str, ...],
    rows: Int[Tensor, " rows"],
    rule: SamplingRule,
    seeds: Sequence[int],
    sources: Sources | None = None,
    step_by_step: Callable[..., ModelStep] = ModelStep,
    tokens_per_look: int | None = None,
) -> SampledTokens:
    """Sample one completion per row until every row has ended.

    Args:
        rows: indices of the encoded, distinct prompts.
        step_by_step: makes the passes after the prefill, of the same arguments as ModelStep.
        tokens_per_look: tokens after which the host looks for rows that have ended; None: each on a CPU, fewer on a
            GPU, which runs dry meanwhile. What is sampled does not depend on it, but for rounding.
    """
    plain = without_router_losses(model)
    prefill = model(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        position_ids=encoded.position_ids,
        use_cache=True,
        logits_to_keep=1,
        **encoded.arguments(),
        **plain,
    )
    cache, logits = prefill.past_key_values, prefill.logits[rows, -1]
    # The samples of a prompt share its prefill.
    cache.batch_select_indices(rows)
    # Without a mask the model looks for padding no more in each step.
    attention = encoded.attention_mask[rows] if encoded.padded else None
    if attention is not None:
        attention = nn.functional.pad(attention, (0, rule.max_tokens), value=1)
    positions = encoded.positions(rule.max_tokens)[..., rows, :]
    step = step_by_step(model, cache, attention, positions)
    between = tokens_per_look or (1 if logits.device.type == "cpu" else TOKENS_PER_LOOK)
    written = Written(len(rows), rule, uniform_numbers(seeds, rule.max_tokens), logits.device, between)
    for index in range(rule.max_tokens):
        written.add(index, logits)
        last = index + 1 == rule.max_tokens
        looks = last or (index + 1) % between == 0
        if looks:
            written.look(index + 1)
        if last:
            break
        if looks and rule.can_end:
            kept = written.active.nonzero()[:, 0]
            if not len(kept):
                break
            if len(kept) <= step.shrinks_at * len(written.rows):
                written.keep(kept)
                step.keep(kept, index)
        logits = step(written.read(index), index)
    return written.sampled(prompts, sources, encoded.lengths[rows])


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
    forbidden: Int[Tensor, " forbidden"] | None = None,
    shared: SharedPrompts | None = None,
) -> ActionLogprobs:
    """Compute log-probs of stored tokens with the positions, padding, support and temperature of their sampling.

    Prompts are encoded for each row, or, if `shared`, once for all rows that have one. Tokens, which are on the CPU,
    are padded on the right. Logits come from the model where its head does not give them (`head_gives_logits`).
    """
    device = encoded.input_ids.device
    token_ids, mask = to_device([token_ids, loss_mask], device)
    read = token_ids
    if forbidden is not None:
        # Its log-prob says that it was never sampled; the model would look for the image of a placeholder.
        read = token_ids.masked_fill(torch.isin(token_ids, forbidden), 0)
    plain, head = without_router_losses(model), nn.Identity() if whole_logits else model.get_output_embeddings()

    def run(kept: int, **inputs: Any) -> Tensor:
        """Return the logits, or the states that the head reads, of the last positions."""
        cached = inputs.get("past_key_values") is not None
        found: Tensor
        if whole_logits:
            found = model(**inputs, **plain, use_cache=cached, logits_to_keep=kept).logits
        else:
            found = model.base_model(**inputs, **plain, use_cache=cached).last_hidden_state[:, -kept:]
        return found

    lengths = completion_lengths(loss_mask).tolist()
    padded = encoded.padded or min(lengths) < token_ids.shape[1] - 1
    # Completions that read a prompt's keys have a mask in any case.
    with unread_padding(device, padded=padded or shared is not None):
        if shared is None:
            states = run(token_ids.shape[1], **_inputs(encoded, read[:, :-1], mask[:, :-1]))
        else:
            states = shared_states(run, encoded, shared, read, mask, lengths)
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
        forbidden=forbidden,
        entropy=entropy,
    )


def _inputs(
    encoded: EncodedPrompts, token_ids: Int[Tensor, "rows fed"], loss_mask: Bool[Tensor, "rows fed"]
) -> dict[str, Any]:
    time = token_ids.shape[1]
    positions = torch.where(loss_mask, encoded.positions(time), 0)
    return {
        "input_ids": torch.cat([encoded.input_ids, torch.where(loss_mask, token_ids, 0)], 1),
        "attention_mask": torch.cat([encoded.attention_mask, loss_mask.to(encoded.attention_mask.dtype)], 1),
        "position_ids": torch.cat([encoded.position_ids, positions], -1),
        **encoded.arguments(time),
    }


@torch.no_grad()
def head_gives_logits(model: Any) -> bool:
    """Return whether the model's logits are its head's output for its last hidden states, without further operations.

    Some models cap or scale the head's output (Gemma 2, Granite, Cohere). Small logits would hide a cap, so the head's
    input is scaled up to logits of about 100 for this comparison.
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
        inputs |= without_router_losses(model)
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
