"""Log-probs of given tokens over the ids that could be sampled, in fp32, one chunk of tokens at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_core.rollouts.actions import TokenSupport
from grpo_core.rollouts.records import ActionLogprobs, Entropies
from grpo_core.transfers import to_device

CHUNK_TOKENS = 256
KEPT_CHUNKS = 4
# Values at a time of which more is computed: those of a processor's cache, and as many as a GPU needs to be busy.
_CPU_BLOCK, GPU_BLOCK = 1 << 18, 1 << 24

Head = Callable[[Tensor], Tensor]


def scaled_logits(
    logits: Float[Tensor, "*batch ids"],
    vocabulary: int,
    temperature: float,
    forbidden: Int[Tensor, " forbidden"] | None = None,
) -> Float[Tensor, "*batch vocabulary"]:
    """Return the logits of the first `vocabulary` ids over the temperature, in fp32, -inf at the forbidden ones."""
    scaled = logits[..., :vocabulary].float()
    if forbidden is not None:
        scaled = scaled.index_fill(-1, forbidden, -torch.inf)
    return scaled if temperature == 1 else scaled / temperature


def vocabulary_logprobs(
    logits: Float[Tensor, "*batch ids"],
    vocabulary: int,
    temperature: float,
    forbidden: Int[Tensor, " forbidden"] | None = None,
) -> Float[Tensor, "*batch vocabulary"]:
    """Compute the log-probs of the first `vocabulary` ids, in fp32 for logits of any dtype, -inf at forbidden ones.

    Sampling and scoring both go through here, so stored and recomputed log-probs agree.
    """
    return torch.log_softmax(scaled_logits(logits, vocabulary, temperature, forbidden), dim=-1)


def gather_logprobs(
    logprobs: Float[Tensor, "*batch vocabulary"], token_ids: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return the log-prob of each given token."""
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def entropy_of(logprobs: Float[Tensor, "*batch vocabulary"]) -> Float[Tensor, "*batch"]:
    """Compute the entropy in nats of each distribution, ids of probability zero included."""
    # At a log-prob of -inf, p * log p would be NaN where it tends to 0; at -1e4, p is 0.
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)


def score_hidden(
    hidden: Float[Tensor, "batch time dim"],
    head: Head,
    token_ids: Int[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    vocabulary: int,
    temperature: float,
    support: TokenSupport | None = None,
    forbidden: Int[Tensor, " forbidden"] | None = None,
    entropy: Entropies = "constant",
    chunk_tokens: int = CHUNK_TOKENS,
) -> ActionLogprobs:
    """Compute the log-probs of given tokens from the hidden states that predict them.

    Logits exist for one chunk of trained tokens at a time and are computed again in the backward pass (Chen et al.,
    2016, arXiv:1604.06174), but for the last chunks, with which that pass begins.

    Args:
        hidden: hidden[b, t] predicts token_ids[b, t].
        head: hidden states [tokens, dim] -> logits [tokens, ids], at least `vocabulary` of them; for a model that
            returns all logits, these are given as hidden states and the head returns them unchanged.
        token_ids: any ids where the mask is False.
        loss_mask: on any device; without a wait where it is on the CPU.
        support: the ids each token was sampled from; None without truncation.
        forbidden: ids below `vocabulary` that are left out.
        chunk_tokens: tokens whose logits are in memory at once.
    """
    # Looked for on the CPU, from where the mask comes: on a GPU the host would wait for their number.
    trained = loss_mask.cpu()
    places = tuple(to_device(trained.nonzero(as_tuple=True), hidden.device))
    states, ids = hidden[places].split(chunk_tokens), token_ids[places].split(chunk_tokens)
    possible = [None] * len(ids) if support is None else _by_chunk(support, trained, chunk_tokens)
    chunks = list(zip(states, ids, possible, strict=True))
    score = partial(
        _score_chunk, head, vocabulary=vocabulary, temperature=temperature, forbidden=forbidden, entropy=entropy
    )
    # With a support, a chunk takes more than twice the memory.
    kept = len(chunks) - (KEPT_CHUNKS if support is None else 1)
    scored = [(_without_keeping if place < kept else _call)(score, *chunk) for place, chunk in enumerate(chunks)]
    logprobs, entropies = torch.cat(scored, 1)
    if entropy != "differentiable":
        entropies = entropies.detach()
    zeros = torch.zeros(loss_mask.shape, device=hidden.device)
    return ActionLogprobs(zeros.index_put(places, logprobs), zeros.index_put(places, entropies), kl=zeros)


def _call(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    return function(*arguments)


def _without_keeping(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call the function and keep only its arguments for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    # There is no dropout in a head, so no random state to restore.
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _score_chunk(
    head: Head,
    states: Float[Tensor, "tokens dim"],
    ids: Int[Tensor, " tokens"],
    possible: TokenSupport | None,
    vocabulary: int,
    temperature: float,
    forbidden: Int[Tensor, " forbidden"] | None,
    entropy: Entropies,
) -> Float[Tensor, "2 tokens"]:
    """Compute log-prob and entropy of each token, as one tensor: unused, a second would be computed again and kept."""
    if possible is None:
        scores = scaled_logits(head(states), vocabulary, temperature, forbidden)
    else:
        outside = ~_possible_ids(possible, vocabulary, states.device)
        logprobs = vocabulary_logprobs(head(states), vocabulary, temperature, forbidden)
        scores = logprobs.masked_fill(outside, -torch.inf)
    # A head that returns what it is given must not have it changed: it may be computed with again.
    ours = scores.is_contiguous() and scores.untyped_storage().data_ptr() != states.untyped_storage().data_ptr()
    scored: Tensor = _Normalised.apply(scores, ids, entropy, ours)
    return scored


def _block_rows(values: Float[Tensor, "tokens ids"]) -> int:
    block = _CPU_BLOCK if values.device.type == "cpu" else GPU_BLOCK
    return max(1, block // values.shape[-1])


class _Normalised(torch.autograd.Function):
    """log_softmax, the log-prob of each given token and the entropies, in the memory of the logits.

    The numbers are those of separate operations, to the bit, which would each need tokens x vocabulary values more.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Float[Tensor, "tokens ids"], ids: Int[Tensor, " tokens"], entropy: Entropies, ours: bool
    ) -> Float[Tensor, "2 tokens"]:
        """Return log-probs and entropies (zeros for "none"); `ours`: the memory of the fp32 scores can be used."""
        logprobs = torch.log_softmax(scores, -1, out=scores.detach()) if ours else torch.log_softmax(scores, -1)
        ctx.save_for_backward(logprobs, ids)
        ctx.with_entropy = entropy == "differentiable"
        chosen = gather_logprobs(logprobs, ids)
        if entropy == "none":
            return torch.stack([chosen, torch.zeros_like(chosen)])
        return torch.stack([chosen, torch.cat(list(map(entropy_of, logprobs.split(_block_rows(logprobs)))))])

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, "2 tokens"]) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, in the memory of the log-probs."""
        (gradient,) = gradients
        logprobs, ids = ctx.saved_tensors
        by_row = (logprobs, ids.unsqueeze(-1), *gradient.unsqueeze(-1))
        blocks = (values.split(_block_rows(logprobs)) for values in by_row)
        for block, chosen, of_chosen, of_entropy in zip(*blocks, strict=True):
            if ctx.with_entropy:
                upstream = block.exp().mul_(block.clamp(min=-1e4) + 1).mul_(-of_entropy)
            else:
                upstream = torch.zeros_like(block)
            upstream.scatter_add_(-1, chosen, of_chosen)
            torch.ops.aten._log_softmax_backward_data.out(upstream, block, -1, block.dtype, out=block)
        return logprobs, None, None, None


def _by_chunk(support: TokenSupport, loss_mask: Bool[Tensor, "batch time"], chunk_tokens: int) -> list[TokenSupport]:
    """Split the support of the trained tokens into one row per chunk."""
    trained = loss_mask.flatten()
    counts = support.counts.flatten()
    ids = support.ids[trained.repeat_interleave(counts)]
    parts = counts[trained].split(chunk_tokens)
    entries = ids.split([int(part.sum()) for part in parts])
    return [TokenSupport(ids, part.unsqueeze(0)) for ids, part in zip(entries, parts, strict=True)]


def _possible_ids(support: TokenSupport, vocabulary: int, device: torch.device) -> Bool[Tensor, "tokens vocabulary"]:
    counts = support.counts[0]
    tokens = torch.arange(len(counts)).repeat_interleave(counts)
    possible = torch.zeros(len(counts), vocabulary, dtype=torch.bool, device=device)
    places = torch.stack([tokens, support.ids.long()]).to(device, non_blocking=True)
    possible[places[0], places[1]] = True
    return possible
