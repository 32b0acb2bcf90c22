"""Whether a loaded model gives the same where a group's prompt is computed once: log-probs, and gradients too.

Log-probs alone would pass a cache that no gradient goes through.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_core.errors import first_line
from grpo_core.parity import ParityTolerance
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import SampledTokens

if TYPE_CHECKING:
    from grpo_core.policies.causal_lm.policy import CausalLMPolicy

GRADIENT = {True: 1e-2, False: 0.15}
"""Largest distance of two gradients, as a share of their length, for values of 32 bits and of fewer.

Rounding makes millionths and up to .07; keys without a gradient .2 and more, values .5.
"""

_COMPARED_BYTES = 256 * 1024**2
_CUTS = (4, 2, 1)


def try_shared_prompts(
    policy: "CausalLMPolicy",
    sample: Callable[[int], SampledTokens],
    allowed: Callable[[SampledTokens], ParityTolerance],
    *,
    wide: bool,
    tries: int,
) -> str:
    """Let the policy compute a prompt once for rows that share it, if it gives what whole rows give; say so in a line.

    The rows are of several lengths, one of one token, and layers are recomputed as an update does.

    Args:
        sample: returns two completions of each of several prompts by the number of a try.
        allowed: the differences of log-probs that rounding makes.
        wide: whether weights and arithmetic have 32 bits.
        tries: rounding sends a token to another expert now and then; a fault is there in each.
    """
    reason, own = "", policy.pass_positions
    # However few positions it has.
    policy.pass_positions = 0
    try:
        for number in range(tries):
            reason = _difference(policy, sample(number), allowed, GRADIENT[wide])
            if not reason:
                break
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A model's own code may raise anything on a cache that it does not know.
        reason = f"a trial of it fails ({first_line(error)})"
    finally:
        policy.prepare_for_sampling()
        policy.pass_positions = own
    policy.trained.shares_prompts = not reason
    return f"each row computes its prompt: {reason}" if reason else "a group's prompt is computed once"


def _difference(
    policy: "CausalLMPolicy",
    sampled: SampledTokens,
    allowed: Callable[[SampledTokens], ParityTolerance],
    gradient: float,
) -> str:
    """Return how log-probs and gradients of shared prompts differ from those of whole rows; empty within rounding."""
    policy.prepare_for_update()
    actions = _ragged(sampled.actions)
    tolerance, mask = allowed(sampled), actions.loss_mask
    parameters = _compared(policy)
    rows, of_rows = _scored(policy, actions, parameters, shares=False)
    shared, of_shared = _scored(policy, actions, parameters, shares=True)
    apart = float((shared - rows)[mask].abs().max())
    if not apart <= tolerance.max_difference:
        return f"log-probs with a shared prompt differ by {apart:.2g}"
    length = _norm(of_rows)
    distance = _norm([one - other for one, other in zip(of_rows, of_shared, strict=True)])
    if not distance <= gradient * length:
        return f"gradients with a shared prompt differ by {distance / length:.2g} of theirs"
    return ""


def _ragged(siblings: TokenBatch) -> TokenBatch:
    """Cut two completions of the first prompt and one of each other to several lengths."""
    actions = siblings.select([0, *range(1, len(siblings), 2)])
    cuts = torch.tensor([_CUTS[row % len(_CUTS)] for row in range(len(actions))])
    mask = actions.loss_mask & (torch.arange(actions.loss_mask.shape[1]) < cuts[:, None])
    return replace(actions, loss_mask=mask, token_ids=actions.token_ids * mask)


def _compared(policy: "CausalLMPolicy") -> list[nn.Parameter]:
    """Return trained parameters in a bounded memory, the first of the model, which all layers' gradients reach."""
    chosen, size = list[nn.Parameter](), 0
    for parameter in policy.trainable_parameters().values():
        if size + parameter.nbytes <= _COMPARED_BYTES:
            chosen.append(parameter)
            size += parameter.nbytes
    return chosen


@torch.enable_grad()
def _scored(
    policy: "CausalLMPolicy", actions: TokenBatch, parameters: list[nn.Parameter], *, shares: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return log-probs, and gradients of a loss in which each token has another weight."""
    policy.trained.shares_prompts = shares
    logprobs = policy.logprobs(actions, entropy="none").logprobs
    weights = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device).view_as(logprobs)
    found = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    gradients = [
        torch.zeros(1, device=each.device) if gradient is None else gradient.float()
        for each, gradient in zip(parameters, found, strict=True)
    ]
    return logprobs.detach().cpu(), gradients


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([each.double().norm() for each in tensors]).norm())
