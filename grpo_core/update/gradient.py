"""The gradient of one minibatch, which does not depend on how it is cut into microbatches."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.microbatch_loss import LossInputs, compute_microbatch_loss
from grpo_core.losses.reductions import Denominators, entropy_threshold, high_entropy_mask, overlong_mask
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.rollouts.records import Entropies, TrainingRows
from grpo_core.update.process_group import ProcessGroup, share
from grpo_core.update.settings import UpdateSettings
from grpo_core.update.step import StepSums, to_host


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, with the denominators of its loss; nothing of the rows is copied.

    Attributes:
        rows: all rows of the update. Without old_logprobs the log-probs of the pass itself are those before the update.
        indices: of the minibatch's rows among them.
        trained: actions of the minibatch that the loss reads.
        entropy_mask: of these, the ones whose entropy is high enough; None where all train.
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


@dataclass
class Passes:
    """What the passes of this process over a minibatch leave, beside the gradients of the parameters.

    Log-probs are of the weights that the passes ran on, zero in rows of other processes; `broken` names the samples
    whose loss is not finite.
    """

    sums: StepSums
    logprobs: Tensor
    broken: list[str] = field(default_factory=list)
    of_gaussians: bool = False


def trained_actions(rows: TrainingRows, settings: UpdateSettings) -> Bool[Tensor, "batch time"]:
    """Return the sampled actions, without truncated rows if the settings mask them."""
    if not settings.mask_truncated:
        return rows.actions.loss_mask
    return overlong_mask(rows.actions.loss_mask, rows.finished)


def make_minibatch(
    rows: TrainingRows,
    indices: list[int],
    trained: Bool[Tensor, "rows time"],
    settings: UpdateSettings,
) -> Minibatch:
    """Compute the masks and denominators of a minibatch of these rows; `trained` is of all rows."""
    own = trained[indices]
    entropy_mask = None
    if settings.entropy_quantile < 1:
        assert rows.old_entropy is not None, "entropies are computed before the first step"
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


def add_up_gradient(
    component: PolicyComponent,
    minibatch: Minibatch,
    settings: UpdateSettings,
    process_group: ProcessGroup,
    tick: Callable[[], None],
) -> Passes:
    """Add the gradients of this process's microbatches to those of the parameters."""
    passes = Passes(StepSums(minibatch.trained), torch.zeros(minibatch.trained.shape))
    parts, found = list[list[int]](), list[Tensor]()
    plan = component.microbatches(minibatch.rows, minibatch.indices, settings.micro_batch_size)
    for part, counts in share(plan, process_group):
        logprobs, broken = _backward(component, minibatch, part, settings, passes, counts=counts)
        if counts:
            parts.append(part)
            found += logprobs, broken
        tick()
    read = iter(to_host(found))
    for part, logprobs, broken in zip(parts, read, read, strict=True):
        passes.logprobs[part, : logprobs.shape[1]] = logprobs
        names = (minibatch.sample_ids[place] for place in part)
        passes.broken += [name for name, bad in zip(names, broken.tolist(), strict=True) if bad]
    return passes


def _backward(
    component: PolicyComponent,
    minibatch: Minibatch,
    part: list[int],
    settings: UpdateSettings,
    passes: Passes,
    *,
    counts: bool,
) -> tuple[Float[Tensor, "part time"], Bool[Tensor, " part"]]:
    """Add one microbatch's share of the minibatch gradient (zeros if it does not count); return its log-probs.

    And the rows whose terms are not finite; all, if the loss is not though each of them is.
    """
    chunk = minibatch.rows.select([minibatch.indices[place] for place in part])
    actions = chunk.actions.trimmed()
    time = actions.loss_mask.shape[1]
    exact_kl = settings.with_reference and settings.kl_estimator == "exact"
    entropy: Entropies = "differentiable" if settings.entropy_coef > 0 else "constant"
    scored = component.logprobs(actions, entropy=entropy, kl=exact_kl)
    logprobs = scored.logprobs.detach()

    def aligned(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:, :time].to(logprobs.device, non_blocking=True)

    mask = minibatch.trained[part, :time].to(logprobs.device, non_blocking=True)
    high_entropy, old = minibatch.entropy_mask, aligned(chunk.old_logprobs)
    inputs = LossInputs(
        logprobs=scored.logprobs,
        old_logprobs=logprobs if old is None else old,
        rollout_logprobs=aligned(chunk.rollout_logprobs),
        ref_logprobs=aligned(chunk.ref_logprobs),
        advantages=chunk.advantages.to(logprobs.device, non_blocking=True),
        loss_mask=mask,
        entropy=scored.entropy,
        entropy_mask=None if high_entropy is None else aligned(high_entropy[part]),
        kl=scored.kl if exact_kl else None,
        gaussians=scored.gaussians,
    )
    loss, terms = compute_microbatch_loss(inputs, settings, minibatch.denominators)
    (loss if counts else loss * 0.0).backward()
    passes.of_gaussians = scored.gaussians is not None
    if counts:
        passes.sums.add(loss, terms, scored.entropy, mask, settings, part)
    finite = torch.isfinite(terms.surrogate + terms.kl).all(-1)
    return logprobs, ~torch.isfinite(loss) & (~finite | finite.all())
