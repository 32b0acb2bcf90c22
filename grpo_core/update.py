"""One policy update over stored rollouts: iteration > epoch > minibatch (one optimizer step) > microbatch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.losses import TokenLoss, compute_grpo_loss
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.parity import ParityTolerance, measure_parity, require_parity
from grpo_core.policies.protocol import Policy
from grpo_core.records import TrainingRows

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UpdateSettings:
    """How stored rollouts become optimizer steps.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows an optimizer step.
        micro_batch_size: rows a forward and backward pass; changes memory, not the gradient.
        clip_range: lower clip of the importance ratio.
        clip_range_high: upper clip of the importance ratio.
        kl_coef: weight of the k3 KL to the reference; 0 computes no reference.
        max_grad_norm: gradients are scaled to this norm.
        parity: allowed difference of stored and recomputed log-probs.
    """

    epochs: int
    minibatch_size: int
    micro_batch_size: int
    clip_range: float
    clip_range_high: float
    kl_coef: float
    max_grad_norm: float
    parity: ParityTolerance


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, as means over its trained tokens unless said otherwise."""

    loss: float
    grad_norm: float
    learning_rate: float
    kl: float
    entropy: float
    clip_low: float
    clip_high: float
    ratio_mean: float


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: its parity measurement and every optimizer step."""

    parity: dict[str, float]
    steps: tuple[StepMetrics, ...]

    def metrics(self) -> dict[str, float]:
        """Means over the optimizer steps, under the names that TRL's dashboards know."""

        def mean(field: str) -> float:
            return math.fsum(getattr(step, field) for step in self.steps) / len(self.steps)

        low, high = [step.clip_low for step in self.steps], [step.clip_high for step in self.steps]
        return {
            "loss": mean("loss"),
            "grad_norm": mean("grad_norm"),
            "learning_rate": self.steps[-1].learning_rate,
            "kl": mean("kl"),
            "entropy": mean("entropy"),
            "importance_ratio/mean": mean("ratio_mean"),
            "clip_ratio/low_mean": mean("clip_low"),
            "clip_ratio/low_min": min(low),
            "clip_ratio/high_mean": mean("clip_high"),
            "clip_ratio/high_max": max(high),
            "clip_ratio/region_mean": mean("clip_low") + mean("clip_high"),
            "optimizer_steps": float(len(self.steps)),
            **self.parity,
        }


@torch.no_grad()
def recompute_logprobs(
    policy: Policy, rows: TrainingRows, micro_batch_size: int, on_progress: Progress | None = None
) -> Float[Tensor, "batch time"]:
    """Log-probs of stored tokens under the policy's present weights, on the CPU, by microbatch."""
    parts = []
    for start in range(0, len(rows), micro_batch_size):
        chunk = range(start, min(start + micro_batch_size, len(rows)))
        parts.append(policy.logprobs(rows.tokens.select(chunk)).logprobs.cpu())
        if on_progress:
            on_progress(chunk.stop, len(rows))
    return torch.cat(parts)


def minibatches(rows: int, minibatch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Row indices of each minibatch; every epoch sees each row once, in an order of its own."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield order[start : start + minibatch_size]


def update_policy(
    policy: Policy,
    optimizer: PolicyOptimizer,
    rows: TrainingRows,
    settings: UpdateSettings,
    *,
    seed: int,
    on_progress: Progress | None = None,
) -> UpdateResult:
    """Train the policy on the rows; the gate comes first.

    Args:
        policy: at the weights that the rows were sampled with.
        optimizer: over the policy's trainable parameters.
        rows: at least one, their advantages finite.
        settings: epochs, sizes, clipping, KL.
        seed: of the minibatch order.
        on_progress: called with microbatches done and in all, the recomputation counted.

    Raises:
        ParityError: stored and recomputed log-probs differ beyond the tolerance; no weight was changed.
        NonFiniteError: a loss or gradient is not finite; names the samples.
    """
    if not len(rows):
        raise ValueError("no sample has an advantage: every reward is null, so there is nothing to learn from")
    per_epoch = sum(
        math.ceil(min(settings.minibatch_size, len(rows) - start) / settings.micro_batch_size)
        for start in range(0, len(rows), settings.minibatch_size)
    )
    recomputed = math.ceil(len(rows) / settings.micro_batch_size)
    ticks = _Ticks(recomputed + settings.epochs * per_epoch, on_progress)
    policy.prepare_for_update()
    old = recompute_logprobs(policy, rows, settings.micro_batch_size, lambda done, total: ticks.tick())
    parity = measure_parity(rows.sample_ids, rows.rollout_logprobs, old, rows.tokens.loss_mask)
    require_parity(parity, settings.parity)
    rows = rows.with_old_logprobs(old)
    steps = tuple(
        _optimizer_step(policy, optimizer, rows.select(indices), settings, ticks)
        for indices in minibatches(len(rows), settings.minibatch_size, settings.epochs, seed)
    )
    return UpdateResult(parity.metrics(), steps)


class _Ticks:
    def __init__(self, total: int, report: Progress | None) -> None:
        self.done, self.total, self.report = 0, total, report

    def tick(self) -> None:
        self.done += 1
        if self.report:
            self.report(self.done, self.total)


def _optimizer_step(
    policy: Policy, optimizer: PolicyOptimizer, minibatch: TrainingRows, settings: UpdateSettings, ticks: _Ticks
) -> StepMetrics:
    optimizer.zero_grad()
    sums = _Sums()
    for start in range(0, len(minibatch), settings.micro_batch_size):
        chunk = minibatch.select(range(start, min(start + settings.micro_batch_size, len(minibatch))))
        sums.add(*_backward(policy, chunk, settings, rows=len(minibatch)))
        ticks.tick()
    grad_norm = optimizer.clip_gradients(settings.max_grad_norm)
    if not math.isfinite(grad_norm):
        mend = "Lower the learning rate, or look at these samples; the last policy version is whole."
        raise NonFiniteError("gradient", minibatch.sample_ids, mend)
    learning_rate = optimizer.learning_rate
    optimizer.step()
    return sums.metrics(grad_norm, learning_rate)


def _backward(
    policy: Policy, chunk: TrainingRows, settings: UpdateSettings, *, rows: int
) -> tuple[float, TokenLoss, Float[Tensor, "batch time"], int]:
    """Add one microbatch's share of the minibatch gradient."""
    assert chunk.old_logprobs is not None, "old_logprobs are recomputed before the first step"
    scored = policy.logprobs(chunk.tokens)
    device = scored.logprobs.device
    reference = policy.reference_logprobs(chunk.tokens) if settings.kl_coef > 0 else None
    mask = chunk.tokens.loss_mask.to(device)
    loss, tokens = compute_grpo_loss(
        scored.logprobs,
        chunk.old_logprobs.to(device),
        chunk.advantages.to(device),
        mask,
        clip_range=settings.clip_range,
        clip_range_high=settings.clip_range_high,
        kl_coef=settings.kl_coef,
        ref_logprobs=reference,
        rows=rows,
    )
    if not torch.isfinite(loss):
        _refuse_non_finite(chunk.sample_ids, tokens)
    loss.backward()
    return float(loss.detach()), tokens, scored.entropy, int(mask.sum())


def _refuse_non_finite(sample_ids: Sequence[str], tokens: TokenLoss) -> None:
    finite = torch.isfinite(tokens.surrogate + tokens.kl).all(-1).tolist()
    broken = [sample for sample, good in zip(sample_ids, finite, strict=True) if not good] or list(sample_ids)
    raise NonFiniteError("loss", broken, "Lower the learning rate, or look at these samples' stored log-probs.")


class _Sums:
    """Token sums over the microbatches of one minibatch; means are taken once, at the end."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.tokens = 0
        self.kl = self.entropy = self.low = self.high = self.ratio = 0.0

    def add(self, loss: float, terms: TokenLoss, entropy: Float[Tensor, "batch time"], tokens: int) -> None:
        self.loss += loss
        self.tokens += tokens
        self.kl += float(terms.kl.detach().sum())
        self.entropy += float(entropy.sum())
        self.low += float(terms.clipped_low.sum())
        self.high += float(terms.clipped_high.sum())
        self.ratio += float(terms.importance_ratio.sum())

    def metrics(self, grad_norm: float, learning_rate: float) -> StepMetrics:
        count = max(self.tokens, 1)
        return StepMetrics(
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            kl=self.kl / count,
            entropy=self.entropy / count,
            clip_low=self.low / count,
            clip_high=self.high / count,
            ratio_mean=self.ratio / count,
        )
