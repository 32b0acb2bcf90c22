"""Train the denoising component on finished images by DiffusionNFT (Zheng et al., 2025, arXiv:2509.16117).

Noise is added to the images again, and the velocity there is regressed: no trajectory, no log-probs, no ratio and so no
parity gate; any sampler can have made the images.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.losses.nft import mean_square, nft_terms
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.protocol import VelocityComponent
from grpo_core.records import DenoisingBatch, TrainingRows
from grpo_core.update.forward_process import ForwardProcess, Noising
from grpo_core.update.metrics import StepMetrics, UpdateResult, mean
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup, share
from grpo_core.update.settings import NftSettings, minibatches
from grpo_core.update.step import (
    OptimizerStep,
    Progress,
    counter,
    keeping_old,
    no_gradient_of_a_refused_update,
    optimizer_step,
)


@dataclass(frozen=True)
class NftStepMetrics(StepMetrics):
    """One optimizer step of DiffusionNFT; means over the images of its minibatch and their noise levels.

    `kl` is the mean square of the distance of the velocity from the reference's.

    Attributes:
        positive_error: of the positive policy's images, squared, over its mean size.
        negative_error: of the negative policy's.
        velocity_change: mean square of the distance of the velocity from the old policy's.
    """

    positive_error: float
    negative_error: float
    velocity_change: float

    @classmethod
    def summarize(cls, steps: Sequence["NftStepMetrics"]) -> dict[str, float]:
        """Return the errors of the implicit policies and the change of the velocity."""
        return {
            "nft/positive_error": mean(step.positive_error for step in steps),
            "nft/negative_error": mean(step.negative_error for step in steps),
            "nft/velocity_change": steps[-1].velocity_change,
        }


@dataclass
class _Passes:
    """Sums over this process's noised images of a minibatch.

    Attributes:
        count: noised images of the whole minibatch, in all processes.
        sums: of loss, policy loss, KL, and the rest of NftStepMetrics.
        broken: names of the samples whose loss is not finite.
    """

    count: int
    sums: Float[Tensor, " measurements"] = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))
    broken: list[str] = field(default_factory=list)

    def metrics(self, process_group: ProcessGroup, made: OptimizerStep, *, with_reference: bool) -> NftStepMetrics:
        """Return the means over the noised images of all processes."""
        loss, policy_loss, kl, positive, negative, change = (process_group.add(self.sums) / self.count).tolist()
        return NftStepMetrics(
            loss=loss,
            policy_loss=policy_loss,
            grad_norm=made.grad_norm,
            learning_rate=made.learning_rate,
            kl=kl if with_reference else None,
            positive_error=positive,
            negative_error=negative,
            velocity_change=change,
        )


def update_by_nft(
    component: VelocityComponent,
    optimizer: PolicyOptimizer,
    rows: TrainingRows,
    settings: NftSettings,
    *,
    seed: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    on_progress: Progress | None = None,
) -> UpdateResult:
    """Train the component on finished images.

    The old policy is the component's copy of that name, if it keeps one before, or the policy before the update.
    Rows that other weights sampled are trained on unchanged, since no ratio relates them to the policy.

    With `settings.ema` the component has to keep its average before, which follows every step.

    Args:
        rows: with finite advantages, and one state per row, the finished latents; without rows nothing changes.
        seed: decides the order of the rows, the noise levels and the noise.
        process_group: the processes that share the update; each has all rows and computes its part of them.
        on_progress: called with the number of passes done and their total.

    Raises:
        NonFiniteError: a loss or gradient is not finite; names the samples.
        ValueError: rows of noisy steps, more noise levels than there are, or a KL without a reference.
    """
    if not len(rows):
        return UpdateResult({}, ())
    trained, size = component.trained, settings.minibatch_size or len(rows)
    component.prepare_for_update()
    process = ForwardProcess(component, rows, settings.timesteps_per_image, seed)
    epoch_steps = -(-len(rows) // size)
    plan = [
        (indices, number // epoch_steps)
        for number, indices in enumerate(minibatches(len(rows), size, settings.epochs, seed))
    ]
    parts = [process.microbatches(indices, epoch, settings.micro_batch_size) for indices, epoch in plan]
    tick = counter(sum(len(share(each, process_group)) for each in parts), on_progress)

    def gradient(number: int) -> _Passes:
        optimizer.zero_grad()
        epoch, passes = plan[number][1], _Passes(process.levels * len(plan[number][0]))
        for part, counts in share(parts[number], process_group):
            _backward(component, process, part, epoch, settings, passes, counts=counts)
            tick()
        return passes

    def step(number: int, passes: _Passes) -> NftStepMetrics:
        names = [rows.sample_ids[index] for index in plan[number][0]]
        made = optimizer_step(optimizer, names, passes.broken, settings.max_grad_norm, process_group)
        if settings.ema is not None:
            trained.copies["ema"].mix(1 - settings.ema)
        return passes.metrics(process_group, made, with_reference=settings.with_reference)

    with no_gradient_of_a_refused_update(optimizer):
        # Until the first step the policy is the one before the update.
        passes = gradient(0)
        with keeping_old(component, needed=len(plan) > 1 and "old" not in trained.copies):
            steps = [step(0, passes)]
            steps += [step(number, gradient(number)) for number in range(1, len(plan))]
    return UpdateResult({}, tuple(steps))


def _backward(
    component: VelocityComponent,
    process: ForwardProcess,
    part: Sequence[Noising],
    epoch: int,
    settings: NftSettings,
    passes: _Passes,
    *,
    counts: bool,
) -> None:
    """Add one microbatch's share of the minibatch gradient; one that does not count adds zeros."""
    actions, noised = process.noised(part, epoch)
    trained = component.trained
    # Before any graph is built: exchanging values would break it.
    reference = _under(trained.reference(), component, actions) if settings.with_reference else None
    old = _under(trained.copies["old"].use(), component, actions) if "old" in trained.copies else None
    velocity = component.velocities(actions)
    old = velocity.detach() if old is None else old
    terms = nft_terms(
        velocity, old, noised.to(velocity), beta=settings.nft_beta, advantage_clip=settings.advantage_clip
    )
    kl = torch.zeros_like(terms.policy) if reference is None else mean_square(velocity - reference)
    losses = terms.policy + settings.kl_coef * kl
    loss = losses.sum() / passes.count
    (loss if counts else loss * 0.0).backward()
    if not counts:
        return
    broken = {each.row for each, finite in zip(part, losses.isfinite().tolist(), strict=True) if not finite}
    passes.broken += [process.rows.sample_ids[row] for row in sorted(broken)]
    change = mean_square((velocity - old).detach())
    measured = (losses, terms.policy, kl, terms.positive, terms.negative, change)
    passes.sums += torch.stack([values.detach().double().sum() for values in measured]).cpu()


@torch.no_grad()
def _under(
    weights: AbstractContextManager[Any], component: VelocityComponent, actions: DenoisingBatch
) -> Float[Tensor, "rows ..."]:
    with weights:
        return component.velocities(actions)
