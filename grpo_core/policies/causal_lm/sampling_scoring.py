"""Sample completions token by token, and compute the log-probs of stored ones in one teacher-forced pass.

A completion ends at an end token, or at the token that completes a stop text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache

from grpo_core.logprobs import gather_logprobs, score_hidden, vocabulary_logprobs
from grpo_core.policies.causal_lm.ends import StopTexts
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.kv_cache import grow_in_place
from grpo_core.rollouts.actions import Sources, TokenBatch, TokenSupport
from grpo_core.rollouts.records import ActionLogprobs, Entropies, SampledTokens
from grpo_core.sampling import SupportRecorder, draw_tokens, truncate, uniform_numbers
from grpo_core.settings import Truncation


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is sampled from logits, and when to stop.

    Attributes:
        vocabulary: ids [0, vocabulary) can be sampled, except the forbidden ones.
        ends: ids that end a row; they are sampled and trained as any other.
        stops: texts that end a row; None: there are none.
        max_tokens: of a row.
        width: number of ids that the model has logits for; 0: as many as `vocabulary`.
    """

    vocabulary: int
    temperature: float
    truncation: Truncation
    ends: tuple[int, ...]
    stops: StopTexts | None
    max_tokens: int
    forbidden: Int[Tensor, " forbidden"] | None = None
    width: int = 0

    @property
    def can_end(self) -> bool:
        """Whether a row can end before its last token."""
        return bool(self.ends or self.stops)

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """The ids that the model has logits for and that cannot be sampled."""
        forbidden = () if self.forbidden is None else self.forbidden.tolist()
        return (*forbidden, *range(self.vocabulary, self.width))


def without_router_losses(model: Any) -> dict[str, bool]:
    """Return the arguments of a call that leave out the losses of routers, which some configurations ask for.

    They are computed from a mask without the keys in a cache.
    """
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


StepByStep = Callable[[Any, Cache, Tensor | None, Tensor], Callable[[Tensor, int], Tensor]]
"""The model, the cache of its rows, their attention mask with all tokens to come (None: no row is padded) and the
positions of these tokens -> a function of the last ids [rows] and their index that returns the next logits."""


@torch.no_grad()
def sample_completions(
    model: Any,
    encoded: EncodedPrompts,
    prompts: tuple[str, ...],
    rows: Int[Tensor, " rows"],
    rule: SamplingRule,
    seeds: Sequence[int],
    sources: Sources | None = None,
    step_by_step: StepByStep | None = None,
) -> SampledTokens:
    """Sample one completion per row until every row has ended; `rows` are indices of the encoded, distinct prompts.

    `step_by_step`, for rows of one length, takes the place of the model's own forward pass.
    """
    assert step_by_step is None or not rule.can_end, "all rows have one length"
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
    grow_in_place(cache, encoded.length + rule.max_tokens)
    # Without a mask the model looks for padding no more in each step.
    attention = None if encoded.attention_mask.all() else encoded.attention_mask[rows]
    if attention is not None:
        attention = nn.functional.pad(attention, (0, rule.max_tokens), value=1)
    positions = encoded.positions(rule.max_tokens)[..., rows, :]
    written = _Written(len(rows), rule, uniform_numbers(seeds, rule.max_tokens), logits.device)
    step = None if step_by_step is None else step_by_step(model, cache, attention, positions)
    for index in range(rule.max_tokens):
        written.add(index, logits)
        if index + 1 == rule.max_tokens:
            break
        if rule.can_end:
            kept = written.active.nonzero()[:, 0]
            if not len(kept):
                break
            # Each time copies the cache, so a row does not leave at once when it ends.
            if len(kept) <= 0.75 * len(written.rows):
                written.keep(kept)
                cache.batch_select_indices(kept)
                positions = positions[..., kept, :]
                attention = None if attention is None else attention[kept]
        if step is not None:
            logits = step(written.ids[:, index], index)
            continue
        logits = model(
            input_ids=written.ids[written.rows, index : index + 1],
            attention_mask=None if attention is None else attention[:, : encoded.length + index + 1],
            position_ids=positions[..., index : index + 1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **plain,
        ).logits[:, -1]
    return written.sampled(prompts, sources, index + 1, encoded.lengths[rows])


class _Written:
    """The tokens of all rows so far; the model reads those of `rows`, some of which may have ended."""

    def __init__(
        self, rows: int, rule: SamplingRule, uniforms: Float[Tensor, "batch time"], device: torch.device
    ) -> None:
        self.rule, self.uniforms = rule, uniforms.to(device)
        self.ids = torch.zeros(rows, rule.max_tokens, dtype=torch.long, device=device)
        self.mask = torch.zeros(rows, rule.max_tokens, dtype=torch.bool, device=device)
        self.logprobs = torch.zeros(rows, rule.max_tokens, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.tensor(rule.ends, dtype=torch.long, device=device)
        self.recorder = SupportRecorder(rows) if rule.truncation.truncates else None
        self.written: list[list[int]] = [[] for _ in range(rows)]  # only for stop texts

    def add(self, index: int, logits: Float[Tensor, "rows ids"]) -> None:
        rule, rows = self.rule, self.rows
        distribution = truncate(
            vocabulary_logprobs(logits, rule.vocabulary, rule.temperature, rule.forbidden), rule.truncation
        )
        sampled = draw_tokens(distribution, self.uniforms[rows, index])
        if self.recorder is not None:
            self.recorder.add(distribution[self.active], rows[self.active].tolist())
        self.ids[rows, index] = torch.where(self.active, sampled, 0)
        self.logprobs[rows, index] = torch.where(self.active, gather_logprobs(distribution, sampled), 0.0)
        self.mask[rows, index] = self.active
        ended = torch.isin(sampled, self.ends)
        if rule.stops:
            ended |= self._stopped(rule.stops, sampled)
        self.active = self.active & ~ended
        self.finished[rows] = ~self.active

    def keep(self, places: Int[Tensor, " kept"]) -> None:
        self.rows, self.active = self.rows[places], self.active[places]

    def _stopped(self, stops: StopTexts, sampled: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        stopped = [False] * len(sampled)
        tokens, rows = sampled.tolist(), self.rows.tolist()
        for place in self.active.nonzero()[:, 0].tolist():
            own = self.written[rows[place]]
            own.append(tokens[place])
            stopped[place] = stops.completed(own)
        return torch.tensor(stopped, device=sampled.device)

    def sampled(
        self, prompts: tuple[str, ...], sources: Sources | None, time: int, prompt_lengths: Int[Tensor, " rows"]
    ) -> SampledTokens:
        """Return the first `time` tokens, on the CPU; ids and log-probs after the end of a row are zero."""
        support = None if self.recorder is None else self.recorder.support()
        ids, mask = self.ids[:, :time].cpu(), self.mask[:, :time].cpu()
        tokens = TokenBatch(prompts, ids, mask, self.rule.temperature, support, sources=sources)
        logprobs, finished = self.logprobs[:, :time].cpu(), self.finished.cpu()
        return SampledTokens(tokens, logprobs, finished, self.rule.max_tokens, prompt_lengths.cpu())


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
) -> ActionLogprobs:
    """Compute log-probs of stored tokens with the positions, padding, support and temperature of their sampling.

    Prompts are encoded for each row, and tokens padded on the right. Logits come from the model where its head does not
    give them (`head_gives_logits`).
    """
    time = token_ids.shape[1]
    read = token_ids
    if forbidden is not None:
        # Its log-prob says that it was never sampled; the model would look for the image of a placeholder.
        read = token_ids.masked_fill(torch.isin(token_ids, forbidden), 0)
    inputs = _inputs(encoded, read[:, :-1], loss_mask[:, :-1]) | without_router_losses(model)
    if whole_logits:
        # One more position than `time` is requested: the slice keeps the last `time` of them.
        states, head = model(**inputs, use_cache=False, logits_to_keep=time).logits, nn.Identity()
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
