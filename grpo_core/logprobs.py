"""From logits to log-probs over the ids that can be sampled, and sampling with one random number a token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def support_logprobs(
    logits: Float[Tensor, "*batch vocab"], support: int, temperature: float
) -> Float[Tensor, "*batch support"]:
    """Log-probs of the first `support` ids, in fp32 whatever the logits are.

    Sampling and scoring both go through here: the same temperature and the same restriction on both sides is
    what makes stored and recomputed log-probs agree.

    Args:
        logits: unnormalised scores.
        support: ids [0, support) can be sampled; the others have probability zero.
        temperature: divides the logits.
    """
    return torch.log_softmax(logits[..., :support].float() / temperature, dim=-1)


def gather_logprobs(
    logprobs: Float[Tensor, "batch time support"], token_ids: Int[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """The log-prob of each given token."""
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def entropy_of(logprobs: Float[Tensor, "*batch support"]) -> Float[Tensor, "*batch"]:
    """Entropy in nats of each distribution."""
    # entr(0) is 0, where p * log p would be NaN.
    terms: Tensor = torch.special.entr(logprobs.exp())
    return terms.sum(-1)


def draw_tokens(logprobs: Float[Tensor, "batch support"], uniforms: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one id a row by inverting the cumulative distribution.

    Each row's id depends on its own distribution and its own uniform number alone, so a sample does not change
    with the rows that happen to be drawn beside it.

    Args:
        logprobs: normalised log-probs. A row of NaN gives id 0, whose log-prob is NaN: the caller sees it there.
        uniforms: in [0, 1), fp64.
    """
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(-1)
    thresholds = uniforms.to(cumulative.device, torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    # `right=True` skips ids of probability zero at a threshold of exactly zero.
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    last_possible = (probabilities > 0).long().mul(torch.arange(logprobs.shape[-1], device=drawn.device))
    return torch.minimum(drawn, last_possible.amax(-1))
