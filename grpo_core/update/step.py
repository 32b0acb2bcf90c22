"""One optimizer step over a minibatch, whose gradient does not depend on how it is cut into microbatches."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.losses import (
    Denominators,
    LossInputs,
    TokenLoss,
    compute_microbatch_loss,
    entropy_threshold,
    high_entropy_mask,
    overlong_mask,
)
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.protocol import Policy
from grpo_core.records import TrainingRows
from grpo_core.update.metrics import StepMetrics, StepSums
from grpo_core.update.process_group import ProcessGroup, share
from grpo_core.update.settings import UpdateSettings, microbatches


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, with the denominators of its loss; nothing of the rows is copied.

    Attributes:
        rows: all rows of the update, with old_logprobs and everything else that the settings need.
        indices: of the minibatch's rows among them.
        trained: tokens of the minibatch that the loss reads.
        entropy_mask: of these, the ones whose entropy is high enough; None where all train.
        denominators: counts of the full minibatch.
    """

    rows: TrainingRows
    indices: list[int]
    trained: Bool[Tensor, "batch time"]
    entropy_mask: Bool[Tensor, "batch time"] | None
    denominators: Denominators

    @property
    def sample_ids(self) -> list[str]:
        """Names of the minibatch's rows."""
        return [self.rows.sample_ids[index] for index in self.indices]


def trained_tokens(rows: TrainingRows, settings: UpdateSettings) -> Bool[Tensor, "batch time"]:
    """Return the sampled tokens, without truncated rows if the settings mask them."""
    if not settings.mask_truncated:
        return rows.tokens.loss_mask
    return overlong_mask(rows.tokens.loss_mask, rows.finished)


def make_minibatch(
    rows: TrainingRows,
    indices: list[int],
    trained: Bool[Tensor, "rows time"],
    settings: UpdateSettings,
) -> Minibatch:
    """Compute the masks and denominators of a minibatch.

    Args:
        rows: all rows of the update.
        indices: of the minibatch's rows.
        trained: from `trained_tokens`, of all rows.
    """
    own = trained[indices]
    entropy_mask = None
    if settings.entropy_quantile < 1:
        assert rows.old_entropy is not None, "entropies are computed with old_logprobs"
        entropies = rows.old_entropy[indices]
        threshold = entropy_threshold(entropies[own], settings.entropy_quantile)
        entropy_mask = high_entropy_mask(entropies, own, threshold=threshold)
    denominators = Denominators(
        rows=len(indices),
        tokens=int(own.sum()),
        entropy_tokens=int((own if entropy_mask is None else entropy_mask).sum()),
        rollout_rows=len(rows),
        rollout_tokens=int(trained.sum()),
        max_completion_length=rows.max_length,
    )
    return Minibatch(rows, indices, own, entropy_mask, denominators)


def optimizer_step(
    policy: Policy,
    optimizer: PolicyOptimizer,
    minibatch: Minibatch,
    settings: UpdateSettings,
    process_group: ProcessGroup,
    tick: Callable[[], None],
) -> StepMetrics:
    """Sum the gradients of all microbatches and processes, clip them, and make one step.

    Raises:
        NonFiniteError: a loss or the gradient is not finite; names the samples. No weight was changed by this step.
    """
    optimizer.zero_grad()
    sums = StepSums(minibatch.trained)
    lengths = minibatch.rows.tokens.loss_mask[minibatch.indices].sum(-1).tolist()
    for part, counts in share(microbatches(lengths, settings.micro_batch_size), process_group):
        _backward(policy, minibatch, part, settings, sums, counts=counts)
        tick()
    parameters = list(optimizer.parameters.values())
    process_group.add_gradients(parameters)
    grad_norm = process_group.gradient_norm(parameters, settings.max_grad_norm)
    if not math.isfinite(grad_norm):
        hint = "Lower the learning rate, or inspect these samples; the last policy version is intact."
        raise NonFiniteError("gradient", minibatch.sample_ids, hint)
    learning_rate = optimizer.learning_rate
    optimizer.step()
    _require_finite_weights(optimizer, minibatch, process_group)
    return sums.metrics(
        process_group, grad_norm=grad_norm, learning_rate=learning_rate, with_reference=settings.with_reference
    )


def _require_finite_weights(optimizer: PolicyOptimizer, minibatch: Minibatch, process_group: ProcessGroup) -> None:
    """Raise on every process if one of them has a broken weight; otherwise the others would wait for it."""
    shares = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in optimizer.parameters.values())
    broken = sum(int(not torch.isfinite(share.detach()).all()) for share in shares)
    if float(process_group.add(torch.tensor(float(broken)))):
        hint = "Lower the learning rate or the weight decay; the last policy version is intact."
        raise NonFiniteError("weight after a step", minibatch.sample_ids, hint)


def _backward(
    policy: Policy, minibatch: Minibatch, part: list[int], settings: UpdateSettings, sums: StepSums, *, counts: bool
) -> None:
    """Add one microbatch's share of the minibatch gradient; one that does not count adds zeros."""
    chunk = minibatch.rows.select([minibatch.indices[place] for place in part])
    tokens = chunk.tokens.trimmed()
    time = tokens.token_ids.shape[1]
    scored = policy.logprobs(tokens, entropy=True)
    device = scored.logprobs.device

    def aligned(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:, :time].to(device)

    def selected(values: Tensor | None) -> Tensor | None:
        return None if values is None else aligned(values[part])

    mask = selected(minibatch.trained)
    assert mask is not None, "every minibatch has its trained tokens"
    assert chunk.old_logprobs is not None, "old_logprobs are recomputed before the first step"
    inputs = LossInputs(
        logprobs=scored.logprobs,
        old_logprobs=chunk.old_logprobs[:, :time].to(device),
        rollout_logprobs=chunk.rollout_logprobs[:, :time].to(device),
        ref_logprobs=aligned(chunk.ref_logprobs),
        advantages=chunk.advantages.to(device),
        loss_mask=mask,
        entropy=scored.entropy,
        entropy_mask=selected(minibatch.entropy_mask),
    )
    loss, terms = compute_microbatch_loss(inputs, settings, minibatch.denominators)
    if not torch.isfinite(loss):
        _refuse_non_finite(chunk.sample_ids, terms)
    (loss if counts else loss * 0.0).backward()
    if counts:
        sums.add(loss, terms, scored.entropy, mask, settings, part)


def _refuse_non_finite(sample_ids: tuple[str, ...], terms: TokenLoss) -> None:
    finite = torch.isfinite(terms.surrogate + terms.kl).all(-1).tolist()
    broken = [sample for sample, good in zip(sample_ids, finite, strict=True) if not good] or list(sample_ids)
    raise NonFiniteError("loss", broken, "Lower the learning rate, or inspect these samples' stored log-probs.")
