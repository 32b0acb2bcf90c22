"""Random minibatches, what they count to, and the loss with its gradients over any split of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_core.losses import LOSSES, Denominators, LossInputs, LossSettings, TokenLoss, compute_microbatch_loss
from grpo_core.records import StepGaussians

MAX_COMPLETION_LENGTH = 11
TOKEN_LOSSES = [loss for loss, traits in LOSSES.items() if not traits.reads_gaussians]


@dataclass(frozen=True)
class Loss:
    """A loss with its gradients by log-probs and by entropy, and the terms of each microbatch."""

    value: float
    logprobs: Tensor
    entropy: Tensor
    terms: tuple[TokenLoss, ...]


def random_inputs(seed: int, *, rows: int = 6, time: int = 7, spread: float = 0.6) -> LossInputs:
    """Ragged rows, one of them empty; both signs of advantage and a zero; ratios on both sides of any clip."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, time + 1, (rows,), generator=generator)
    advantages = normal(rows)
    if rows > 1:
        empty, zero = torch.randperm(rows, generator=generator)[:2].tolist()
        lengths[empty], advantages[zero] = 0, 0.0
    old = -normal(rows, time).abs() - 0.5
    entropy = normal(rows, time).abs().float().double()
    mask = torch.arange(time) < lengths.unsqueeze(-1)
    return LossInputs(
        logprobs=old + spread * normal(rows, time),
        old_logprobs=old,
        advantages=advantages,
        loss_mask=mask,
        rollout_logprobs=old + 0.8 * normal(rows, time),
        ref_logprobs=old + spread * normal(rows, time),
        entropy=entropy,
        entropy_mask=(entropy > 0.6) & mask,
    )


def select(inputs: LossInputs, rows: Sequence[int]) -> LossInputs:
    """The rows with these indices."""
    index = torch.as_tensor(rows, dtype=torch.long)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    chosen = {name: value[index] for name, value in values.items() if isinstance(value, Tensor)}
    if inputs.gaussians is not None:
        chosen["gaussians"] = StepGaussians(*(value[index] for value in vars(inputs.gaussians).values()))
    return LossInputs(**chosen)


def count(inputs: LossInputs, *, rollout_rows: int | None = None, rollout_tokens: int | None = None) -> Denominators:
    """Denominators of these rows as one minibatch, by default the whole rollout set."""
    mask = inputs.loss_mask
    entropy_mask = mask if inputs.entropy_mask is None else mask & inputs.entropy_mask
    tokens = int(mask.sum())
    return Denominators(
        rows=len(mask),
        tokens=tokens,
        entropy_tokens=int(entropy_mask.sum()),
        rollout_rows=rollout_rows or len(mask),
        rollout_tokens=rollout_tokens or tokens,
        max_completion_length=MAX_COMPLETION_LENGTH,
    )


def loss_of(
    inputs: LossInputs,
    settings: LossSettings,
    denominators: Denominators | None = None,
    split: Sequence[Sequence[int]] | None = None,
) -> Loss:
    """The loss of a minibatch, summed over its microbatches; gradients in the order of the minibatch's rows."""
    denominators = denominators or count(inputs)
    rows = range(len(inputs.loss_mask))
    value, terms = 0.0, []
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    entropy = None if inputs.entropy is None else inputs.entropy.detach().clone().requires_grad_()
    whole = LossInputs(
        logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.loss_mask,
        inputs.rollout_logprobs,
        inputs.ref_logprobs,
        entropy,
        inputs.entropy_mask,
    )
    for part in split or [rows]:
        loss, tokens = compute_microbatch_loss(select(whole, part), settings, denominators)
        loss.backward()
        value += float(loss.detach())
        terms.append(tokens)
    assert logprobs.grad is not None
    zero = torch.zeros_like(logprobs)
    entropy_gradient = zero if entropy is None or entropy.grad is None else entropy.grad
    return Loss(value, logprobs.grad, entropy_gradient, tuple(terms))
