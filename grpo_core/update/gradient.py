"""The gradient of one minibatch, which does not depend on how it is cut into microbatches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.microbatch_loss import LossInputs, TokenLoss, compute_microbatch_loss
from grpo_core.losses.reductions import Denominators, entropy_threshold, high_entropy_mask
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.ragged import Ragged, RaggedRows
from grpo_core.rollouts.records import ActionLogprobs, Entropies, StepGaussians, StepMeans, TrainingRows
from grpo_core.transfers import to_device, to_host
from grpo_core.update.process_group import ProcessGroup, share
from grpo_core.update.settings import UpdateSettings
from grpo_core.update.step import StepSums


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, with the denominators of its loss; nothing of the rows is copied.

    Attributes:
        rows: all rows of the update. Without old_logprobs the log-probs of the pass itself are those before the update.
        indices: of the minibatch's rows among them.
        trained: actions of the minibatch that the loss reads.
        entropy_mask: of these, the ones whose entropy is high enough; None where all train.
    """

    rows: RaggedRows
    indices: list[int]
    trained: Ragged
    entropy_mask: Ragged | None
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
    logprobs: Ragged
    broken: list[str] = field(default_factory=list)
    of_gaussians: bool = False


def trained_actions(rows: RaggedRows, settings: UpdateSettings) -> Ragged:
    """Return the mask of the sampled actions, without truncated rows if the settings mask them.

    Yu et al., 2025, DAPO (arXiv:2503.14476), section 3.4, overlong filtering. The rows stay in the count of rows.
    """
    sampled = rows.loss_mask
    if not settings.mask_truncated:
        return sampled
    return sampled.like(sampled.values & sampled.by_action(rows.finished))


def make_minibatch(
    rows: RaggedRows,
    indices: list[int],
    trained: Ragged,
    settings: UpdateSettings,
) -> Minibatch:
    """Compute the masks and denominators of a minibatch of these rows; `trained` is of all rows."""
    own = trained.take(indices)
    entropy_mask = None
    if settings.entropy_quantile < 1:
        assert rows.old_entropy is not None, "entropies are computed before the first step"
        entropies = rows.old_entropy.take(indices).values
        threshold = entropy_threshold(entropies[own.values], settings.entropy_quantile)
        entropy_mask = own.like(high_entropy_mask(entropies, own.values, threshold=threshold))
    denominators = Denominators(
        rows=len(indices),
        tokens=int(own.values.sum()),
        entropy_tokens=int((own if entropy_mask is None else entropy_mask).values.sum()),
        rollout_rows=len(rows),
        rollout_tokens=trained.total,
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
    rows, indices = minibatch.rows, minibatch.indices
    trained = minibatch.trained
    exact_kl = settings.with_reference and settings.kl_estimator == "exact"
    passes = Passes(StepSums(trained.sums() > 0, norms=exact_kl), trained.like(torch.zeros(len(trained.values))))
    parts, found = list[list[int]](), list[Tensor]()
    shares = share(component.microbatches(rows, indices, settings.micro_batch_size), process_group)
    batches = (rows.select([indices[place] for place in part]) for part, _ in shares)
    compared = component.compared(batches, kl=exact_kl)
    for (part, counts), (batch, others) in zip(shares, compared, strict=True):
        microbatch = _Microbatch(component, minibatch, part, batch, others, settings, counts=counts)
        logprobs, broken = microbatch.backward(passes)
        if counts:
            parts.append(part)
            found += logprobs, broken
        tick()
    read, sample_ids = iter(to_host(found)), minibatch.sample_ids
    for part, logprobs, broken in zip(parts, read, read, strict=True):
        passes.logprobs.put(part, logprobs)
        names = (sample_ids[place] for place in part)
        passes.broken += [name for name, bad in zip(names, broken.tolist(), strict=True) if bad]
    return passes


class _Microbatch:
    """Some rows of a minibatch, and how their share of its gradient comes about; zeros if they do not count."""

    def __init__(
        self,
        component: PolicyComponent,
        minibatch: Minibatch,
        part: list[int],
        batch: TrainingRows,
        others: StepMeans | None,
        settings: UpdateSettings,
        *,
        counts: bool,
    ) -> None:
        self.component, self.minibatch, self.part, self.batch = component, minibatch, part, batch
        self.others, self.settings, self.counts = others, settings, counts
        self.actions = batch.actions.trimmed()
        self.time = self.actions.loss_mask.shape[1]
        self._moved: Mapping[str, Tensor] = {}

    def backward(self, passes: Passes) -> tuple[Float[Tensor, "part time"], Bool[Tensor, " part"]]:
        """Add the share of the gradient; return log-probs, and the rows whose terms are not finite.

        Those are all rows, if the loss is not finite though each of them is.
        """
        settings = self.settings
        if settings.backward_per_step is True and self.time > 1:
            scored = self._backward_by_step()
            loss, terms = self._loss(scored)
        else:
            entropy: Entropies = "differentiable" if settings.entropy_coef > 0 else "constant"
            scored = self.component.logprobs(self.actions, entropy=entropy, others=self.others)
            loss, terms = self._loss(scored)
            (loss if self.counts else loss * 0.0).backward()
        passes.of_gaussians = scored.gaussians is not None
        if self.counts:
            mask = self._constants(scored.logprobs.device)["loss_mask"]
            passes.sums.add(loss, terms, scored, mask, settings, self.part)
        finite = torch.isfinite(terms.surrogate + terms.kl).all(-1)
        return scored.logprobs.detach(), ~torch.isfinite(loss) & (~finite | finite.all())

    def _backward_by_step(self) -> ActionLogprobs:
        """Go forward and back one denoising step after the other; return what was found of all steps, as constants.

        The loss is a function of the steps' log-probs, KL and drift, so a step needs its gradient by these alone. Where
        it depends on the other steps, a pass without gradients finds their values before.
        """
        assert isinstance(self.actions, DenoisingBatch), "tokens of a row are one pass"
        known = None
        if self.settings.couples_actions:
            with torch.no_grad():
                known = self.component.logprobs(self.actions, others=self.others)
        found: list[tuple[Tensor, ...]] = []
        norms: list[Tensor] = []
        for step in range(self.time):
            others = None if self.others is None else self.others.at_step(step)
            scored = self.component.logprobs(self.actions.at_step(step), others=others)
            measured, gradients = _measured(scored), self._gradients(known or scored)
            reached = [place for place, each in enumerate(measured) if each.requires_grad]
            own = [gradients[place][:, step : step + 1] for place in reached]
            torch.autograd.backward([measured[place] for place in reached], own)
            found.append(tuple(each.detach() for each in measured))
            norms += [] if scored.velocity_norm is None else [scored.velocity_norm]
        logprobs, kl, *gaussians = (torch.cat(values, 1) for values in zip(*found, strict=True))
        norm = torch.cat(norms, 1) if norms else None
        return ActionLogprobs(logprobs, None, kl, StepGaussians(*gaussians), norm)

    def _gradients(self, values: ActionLogprobs) -> tuple[Tensor, ...]:
        """Return the loss's gradient by what is measured of each step; of one step's values, only its own is right."""
        shape = values.logprobs.shape[0], self.time
        leaves = [each.detach().expand(shape).clone().requires_grad_() for each in _measured(values)]
        logprobs, kl, *gaussians = leaves
        loss, _ = self._loss(ActionLogprobs(logprobs, None, kl, StepGaussians(*gaussians)))
        loss = loss if self.counts else loss * 0.0
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    def _loss(self, scored: ActionLogprobs) -> tuple[Float[Tensor, ""], TokenLoss]:
        """Compute the microbatch's share of the loss, and its terms."""
        settings, logprobs = self.settings, scored.logprobs
        given = {"old_logprobs": logprobs.detach(), **self._constants(logprobs.device)}
        exact_kl = settings.with_reference and settings.kl_estimator == "exact"
        kl = scored.kl if exact_kl else None
        inputs = LossInputs(logprobs, entropy=scored.entropy, kl=kl, gaussians=scored.gaussians, **given)
        return compute_microbatch_loss(inputs, settings, self.minibatch.denominators)

    def _constants(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the stored values that the loss reads, by the names of LossInputs, after one transfer."""
        if self._moved:
            return self._moved
        batch, minibatch, part = self.batch, self.minibatch, self.part
        by_action = {
            "loss_mask": minibatch.trained.select(part),
            "old_logprobs": batch.old_logprobs,
            "rollout_logprobs": batch.rollout_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            "entropy_mask": None if minibatch.entropy_mask is None else minibatch.entropy_mask.select(part),
        }
        known = {name: values[:, : self.time] for name, values in by_action.items() if values is not None}
        known["advantages"] = batch.advantages
        self._moved = dict(zip(known, to_device([*known.values()], device), strict=True))
        return self._moved


def _measured(scored: ActionLogprobs) -> tuple[Tensor, ...]:
    """Return what a loss reads of denoising steps: the fields of ActionLogprobs, then of StepGaussians."""
    gaussians = scored.gaussians
    assert gaussians is not None, "only a loss of denoising steps is taken step by step"
    return scored.logprobs, scored.kl, gaussians.drift, gaussians.std, gaussians.dt
