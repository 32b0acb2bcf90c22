"""One optimizer step and what surrounds it; the measurements of an update, under the names of TRL's dashboards."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils import get_total_norm

from grpo_core.errors import NonFiniteError
from grpo_core.losses.microbatch_loss import TokenLoss, clipped_share_of_rows, count_clipped
from grpo_core.losses.settings import LossSettings
from grpo_core.parity import ParityError
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.rollouts.records import ActionLogprobs
from grpo_core.transfers import to_host
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.process_group import ProcessGroup
from grpo_core.update.settings import VELOCITY_NORM, StepSettings

Progress = Callable[[int, int], None]


class Tick(Protocol):
    """Counts passes that are done."""

    def __call__(self, passes: int = 1) -> None:
        """Count these passes, of which some may have been found needless."""


@dataclass(frozen=True)
class OptimizerStep:
    """The norm of all processes' gradient before it was clipped, and the learning rate of a step."""

    grad_norm: float
    learning_rate: float


def optimizer_step(
    component: PolicyComponent,
    optimizer: PolicyOptimizer,
    sample_ids: Sequence[str],
    broken: Sequence[str],
    settings: StepSettings,
    process_group: ProcessGroup,
) -> OptimizerStep:
    """Sum the gradients of all processes, clip them, and make one step, which the component's average follows.

    NonFiniteError names the broken samples, or all of the minibatch for a gradient that is not finite; no weight was
    changed by this step then.
    """
    if broken:
        hint = "Lower the learning rate, or inspect what is stored of these samples."
        raise NonFiniteError("loss", broken, hint)
    parameters = list(optimizer.parameters.values())
    process_group.add_gradients(parameters)
    grad_norm = process_group.gradient_norm(parameters, settings.max_grad_norm)
    if not math.isfinite(grad_norm):
        hint = "Lower the learning rate, or inspect these samples; the last policy version is intact."
        raise NonFiniteError("gradient", sample_ids, hint)
    learning_rate = optimizer.learning_rate
    optimizer.step()
    _require_finite_weights(optimizer, sample_ids, process_group)
    if settings.ema is not None:
        component.trained.copies["ema"].mix(1 - settings.ema)
    return OptimizerStep(grad_norm, learning_rate)


def _require_finite_weights(optimizer: PolicyOptimizer, sample_ids: Sequence[str], process_group: ProcessGroup) -> None:
    """Raise on every process if one of them has a broken weight; otherwise the others would wait for it."""
    weights = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in optimizer.parameters.values())
    # One pass over each without a temporary of its size; the largest of NaN and anything is NaN.
    largest = get_total_norm([weight.detach() for weight in weights if weight.numel()], math.inf)
    broken = 0.0 if math.isfinite(largest) else 1.0
    if float(process_group.add(torch.tensor(broken))):
        hint = "Lower the learning rate or the weight decay; the last policy version is intact."
        raise NonFiniteError("weight after a step", sample_ids, hint)


@contextmanager
def no_gradient_of_a_refused_update(optimizer: PolicyOptimizer) -> Iterator[None]:
    """Leave no gradient behind if the update inside is refused."""
    try:
        yield
    except (ParityError, NonFiniteError):
        optimizer.zero_grad()
        raise


@contextmanager
def keeping_old(component: PolicyComponent, *, needed: bool) -> Iterator[None]:
    """Keep the weights before the update, for losses that measure how far it has moved."""
    if needed:
        component.trained.keep("old")
    try:
        yield
    finally:
        if needed:
            del component.trained.copies["old"]


def counter(total: int, report: Progress | None) -> Tick:
    """Return what is called after each pass, and reports the number of passes done with their total."""
    done = 0

    def tick(passes: int = 1) -> None:
        nonlocal done
        done += passes
        if report and passes:
            report(done, total)

    return tick


@dataclass(frozen=True)
class StepMetrics(ABC):
    """One optimizer step, whatever the algorithm; `grad_norm` is that before it was clipped.

    `policy_loss` is the loss without KL and entropy bonus, `kl` the distance to the reference, None without one.
    """

    loss: float
    policy_loss: float
    grad_norm: float
    learning_rate: float
    kl: float | None

    @classmethod
    @abstractmethod
    def summarize(cls, steps: Sequence[Any]) -> dict[str, float]:
        """Return what only this algorithm measures, over the steps of an update, by name."""


@dataclass(frozen=True)
class RatioStepMetrics(StepMetrics):
    """One optimizer step on importance ratios; means over its trained tokens unless said otherwise.

    `kl` is the estimate of KL(policy || reference), nats.

    Attributes:
        entropy: nats; None where no weight can change it.
        clip_low: share of tokens where the lower bound is active; of rows where a row has one ratio.
        clip_high: the same for the upper bound.
        clip_low_min: smallest share over the rows; clip_high_max: the largest.
        log_ratio_clamped: number of tokens whose log-ratio was clamped.
        mismatch_weight: correction for a sampler that is not the policy; 1 where there is none.
        trained_tokens: number of tokens that the loss reads.
        velocity_norm: of denoising steps, the norm of the velocity over the reference's; None without an exact KL.
    """

    entropy: float | None
    clip_low: float
    clip_high: float
    clip_low_min: float
    clip_high_max: float
    ratio_mean: float
    log_ratio_clamped: float
    mismatch_weight: float
    trained_tokens: float
    velocity_norm: float | None = None

    @classmethod
    def summarize(cls, steps: Sequence["RatioStepMetrics"]) -> dict[str, float]:
        """Return entropy, ratios, clipped shares, the correction for the sampler, and the norm at the last step."""
        entropies = [step.entropy for step in steps if step.entropy is not None]
        norm = steps[-1].velocity_norm
        return {
            **({"entropy": mean(entropies)} if entropies else {}),
            **({} if norm is None else {VELOCITY_NORM: norm}),
            "importance_ratio/mean": mean(step.ratio_mean for step in steps),
            "log_ratio_clamped": math.fsum(step.log_ratio_clamped for step in steps),
            "clip_ratio/low_mean": mean(step.clip_low for step in steps),
            "clip_ratio/low_min": min(step.clip_low_min for step in steps),
            "clip_ratio/high_mean": mean(step.clip_high for step in steps),
            "clip_ratio/high_max": max(step.clip_high_max for step in steps),
            "clip_ratio/region_mean": mean(step.clip_low for step in steps) + mean(step.clip_high for step in steps),
            "mismatch/mean_weight": mean(step.mismatch_weight for step in steps),
        }


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    known = list(values)
    return math.fsum(known) / len(known)


@dataclass(frozen=True)
class UpdateResult:
    """Measurements before the first step, such as parity, by name, and every optimizer step, all of one algorithm."""

    before: dict[str, float]
    steps: tuple[StepMetrics, ...]

    def metrics(self) -> dict[str, float]:
        """Return means over the optimizer steps; without a step, only the measurements made before it."""
        if not self.steps:
            return {"optimizer_steps": 0.0, **self.before}
        kl = [step.kl for step in self.steps if step.kl is not None]
        return {
            "loss": mean(step.loss for step in self.steps),
            "policy_loss": mean(step.policy_loss for step in self.steps),
            "grad_norm": mean(step.grad_norm for step in self.steps),
            "learning_rate": self.steps[-1].learning_rate,
            **({"kl": mean(kl)} if kl else {}),
            **type(self.steps[0]).summarize(self.steps),
            "optimizer_steps": float(len(self.steps)),
            **self.before,
        }


class StepSums:
    """Sums over the microbatches of one minibatch, on their device; they are read, and means taken, once at the end."""

    def __init__(self, trained: Bool[Tensor, " rows"], *, norms: bool) -> None:
        """Begin with the rows of the minibatch that have a trained action, and whether norms of velocities are added.

        A process may have no microbatch.
        """
        self._rows, self._norms = trained, norms
        self._sums: Tensor | float = 0.0
        # By row: the minimum over processes then comes from a sum in which each row is counted once.
        self._clipped: list[tuple[list[int], Tensor]] = []

    def add(
        self,
        loss: Float[Tensor, ""],
        terms: TokenLoss,
        scored: ActionLogprobs,
        mask: Bool[Tensor, "batch time"],
        settings: LossSettings,
        rows: list[int],
    ) -> None:
        """Add one microbatch, of these rows of the minibatch."""
        weights = mask if terms.mismatch_weights is None else terms.mismatch_weights
        over_tokens = (
            terms.kl,
            torch.zeros_like(terms.kl) if scored.entropy is None else scored.entropy.detach(),
            terms.importance_ratio,
            terms.log_ratio_clamped,
            weights,
            mask,
            *([scored.velocity_norm] if self._norms and scored.velocity_norm is not None else ()),
        )
        sums = [torch.where(mask, each, 0.0).double().sum() for each in over_tokens]
        clipped = count_clipped(terms, mask, settings)
        losses = [loss.detach().double(), terms.policy_loss.double()]
        self._sums = self._sums + torch.cat([clipped, torch.stack([*losses, *sums])])
        shares = [clipped_share_of_rows(flags, mask) for flags in (terms.clipped_low, terms.clipped_high)]
        self._clipped.append((rows, torch.stack(shares).nan_to_num().double()))

    def metrics(
        self, process_group: ProcessGroup, made: OptimizerStep, *, with_reference: bool, with_entropy: bool
    ) -> RatioStepMetrics:
        """Return the means over the tokens of all processes."""
        none = torch.zeros(11 + self._norms, dtype=torch.float64)
        parts = [found for _, found in self._clipped]
        own, *clipped = to_host([self._sums if isinstance(self._sums, Tensor) else none, *parts])
        sums = process_group.add(own).tolist()
        clip_low, clip_high, counted, loss, policy_loss, kl, entropy, ratio, clamped, weight, tokens, *norm = sums
        shares = torch.zeros(2, len(self._rows), dtype=torch.float64)
        for (rows, _), found in zip(self._clipped, clipped, strict=True):
            shares[:, rows] = found
        low, high = process_group.add(shares)[:, self._rows]
        divisor, counted = max(tokens, 1.0), max(counted, 1.0)
        return RatioStepMetrics(
            loss=loss,
            policy_loss=policy_loss,
            grad_norm=made.grad_norm,
            learning_rate=made.learning_rate,
            kl=kl / divisor if with_reference else None,
            entropy=entropy / divisor if with_entropy else None,
            clip_low=clip_low / counted,
            clip_high=clip_high / counted,
            clip_low_min=float(low.min()) if len(low) else 0.0,
            clip_high_max=float(high.max()) if len(high) else 0.0,
            ratio_mean=ratio / divisor,
            log_ratio_clamped=clamped,
            mismatch_weight=weight / divisor,
            trained_tokens=tokens,
            velocity_norm=norm[0] / divisor if norm else None,
        )
