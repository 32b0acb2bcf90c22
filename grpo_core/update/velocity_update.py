"""Train the denoising component on finished images: noise is added to them again, and the velocity there is matched.

There is no trajectory, no log-prob of a sampler and so no parity gate; any sampler can have made the images.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.settings import ImplicitPair, SignedRow, VelocityRow
from grpo_core.losses.velocity_matching import NoisedImages, mean_square, velocity_terms
from grpo_core.policies.protocol import VelocityComponent
from grpo_core.policies.trained.model import BATCHES_PER_EXCHANGE
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import TrainingRows
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import derive_seed, make_generator
from grpo_core.transfers import to_host
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup, share
from grpo_core.update.settings import VELOCITY_NORM, minibatches
from grpo_core.update.step import (
    OptimizerStep,
    Progress,
    StepMetrics,
    UpdateResult,
    counter,
    keeping_old,
    mean,
    no_gradient_of_a_refused_update,
    optimizer_step,
)
from grpo_core.update.velocity_settings import VelocitySettings


@dataclass(frozen=True, order=True)
class Noising:
    """One image, a row of the update, at one noise level, that before a denoising step.

    Ordered so that neighbours can share a call of the pipeline.
    """

    size: ImageSize
    prompt: str
    step: int
    row: int


class ForwardProcess:
    """The images of an update, with noise that depends on the seed, the epoch, the level and an image's name alone.

    With `shared_noise` it depends on the image's prompt in place of its name.
    """

    def __init__(
        self,
        component: VelocityComponent,
        rows: RaggedRows | TrainingRows,
        timesteps_per_image: int | None,
        seed: int,
        *,
        shared_noise: bool = False,
    ):
        """Read the noise levels of every size; ValueError for rows of noisy steps, or fewer levels than wanted.

        Rows have one state, the finished latents; without a number of timesteps an image is trained at all levels.
        """
        actions = rows.actions
        if not isinstance(actions, DenoisingBatch) or any(len(states) != 1 for states in actions.states):
            raise ValueError("it learns from finished images alone; sample them with rollout.sde_window_size 0")
        self.rows, self.images, self.seed, self.shared_noise = rows, actions, seed, shared_noise
        self.sigmas: Mapping[ImageSize, Float[Tensor, " steps"]] = {
            size: component.sigmas(actions.select([actions.sizes.index(size)])) for size in dict.fromkeys(actions.sizes)
        }
        levels = min(map(len, self.sigmas.values()))
        self.levels = levels if timesteps_per_image is None else timesteps_per_image
        if self.levels > levels:
            raise ValueError(f"images were denoised in {levels} steps, so there are no {self.levels} noise levels")

    def microbatches(self, indices: Sequence[int], epoch: int, size: int) -> list[list[Noising]]:
        """Return every image with each of its levels in an epoch, from 0, in microbatches of one image size."""
        noisings = sorted(each for row in indices for each in self._of_row(row, epoch))
        alike = (list(group) for _, group in groupby(noisings, lambda noising: noising.size))
        return [group[start : start + size] for group in alike for start in range(0, len(group), size)]

    def _of_row(self, row: int, epoch: int) -> Iterator[Noising]:
        """Yield an image at its levels, the same for all images of a prompt: these are compared with each other."""
        size, prompt = self.images.sizes[row], self.images.prompts[row]
        generator = make_generator(derive_seed(self.seed, "timesteps", epoch, prompt))
        drawn = torch.randperm(len(self.sigmas[size]), generator=generator)[: self.levels]
        yield from (Noising(size, prompt, step, row) for step in drawn.tolist())

    def noised(self, part: Sequence[Noising], epoch: int) -> tuple[DenoisingBatch, NoisedImages]:
        """Add noise to images of one size; return what the component computes velocities of, and the loss's inputs."""
        rows = [each.row for each in part]
        chosen = self.images.select(rows)
        stored = torch.stack([states[0] for states in chosen.states])
        images = stored.to(torch.promote_types(stored.dtype, torch.float32))
        sigmas = self.sigmas[part[0].size][[each.step for each in part]].to(images)
        noise = torch.stack([self._noise(each, epoch, images.shape[1:]) for each in part]).to(images)
        share = sigmas.view(-1, *(1,) * (images.ndim - 1))
        # Latents in bf16 belong to a pipeline that works in it; those in fp16 to one in fp32.
        working = images.dtype if stored.dtype == torch.float16 else stored.dtype
        noised = ((1 - share) * images + share * noise).to(working)
        actions = replace(chosen, states=tuple(noised.unsqueeze(1)), first_steps=tuple(each.step for each in part))
        return actions, NoisedImages(images, noised.to(images), sigmas, self.rows.advantages[rows].to(images))

    def _noise(self, noising: Noising, epoch: int, shape: torch.Size) -> Tensor:
        name = noising.prompt if self.shared_noise else self.rows.sample_ids[noising.row]
        return torch.randn(shape, generator=make_generator(derive_seed(self.seed, "noise", epoch, name, noising.step)))


@dataclass(frozen=True)
class VelocityStepMetrics(StepMetrics):
    """One optimizer step that matches velocities; means over the images of its minibatch and their noise levels.

    `kl` is the mean square of the distance of the velocity from the reference's, `velocity_norm` its norm over that of
    the reference's, which training for a reward inflates (NormGuard, arXiv:2606.27771); both None without a reference.
    """

    velocity_norm: float | None

    @classmethod
    def summarize(cls, steps: Sequence[Any]) -> dict[str, float]:
        """Return the velocity's norm at the last step, if there is a reference."""
        norm = steps[-1].velocity_norm
        return {} if norm is None else {VELOCITY_NORM: norm}


@dataclass(frozen=True)
class NftStepMetrics(VelocityStepMetrics):
    """One optimizer step of DiffusionNFT.

    `positive_error` and `negative_error` are mean squares of the errors of the implicit policies' images over their
    mean size; `velocity_change` is that of the velocity's distance from the old policy's.
    """

    positive_error: float
    negative_error: float
    velocity_change: float

    @classmethod
    def summarize(cls, steps: Sequence["NftStepMetrics"]) -> dict[str, float]:
        """Return the errors of the implicit policies and the change of the velocity."""
        return super().summarize(steps) | {
            "nft/positive_error": mean(step.positive_error for step in steps),
            "nft/negative_error": mean(step.negative_error for step in steps),
            "nft/velocity_change": steps[-1].velocity_change,
        }


@dataclass(frozen=True)
class SignedStepMetrics(VelocityStepMetrics):
    """One optimizer step on errors with the sign of their advantage.

    `velocity_error` is the mean square of the velocity's distance from noise - image, `clipped` the share of the
    clipped ratios.
    """

    velocity_error: float
    clipped: float

    @classmethod
    def summarize(cls, steps: Sequence["SignedStepMetrics"]) -> dict[str, float]:
        """Return the error of the velocity, and the clipped share."""
        return super().summarize(steps) | {
            "velocity/error": mean(step.velocity_error for step in steps),
            "velocity/clip_ratio": mean(step.clipped for step in steps),
        }


METRICS: Mapping[type[VelocityRow], type[VelocityStepMetrics]] = {
    ImplicitPair: NftStepMetrics,
    SignedRow: SignedStepMetrics,
}
"""By the loss of a row, in the order in which its terms are measured."""


@dataclass
class _Passes:
    """Sums over this process's noised images, of `count` in all: losses, KL, norm, what `metrics` has besides."""

    count: int
    metrics: type[VelocityStepMetrics]
    broken: list[str] = field(default_factory=list)
    _found: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A process may have no images.
        self.sums = torch.zeros(4 + len(self._own), dtype=torch.float64)

    @property
    def _own(self) -> list[str]:
        common = {each.name for each in fields(VelocityStepMetrics)}
        return [each.name for each in fields(self.metrics) if each.name not in common]

    def add(self, rows: list[int], finite: Bool[Tensor, " images"], sums: Float[Tensor, " measurements"]) -> None:
        """Keep what one pass over images of these rows has found, on its device."""
        self._found.append((rows, finite, sums))

    def read(self, sample_ids: Sequence[str]) -> None:
        """Sum up the passes, once all are queued."""
        read = iter(to_host([each for _, *both in self._found for each in both]))
        for (rows, *_), finite, sums in zip(self._found, read, read, strict=True):
            self.sums += sums
            broken = {row for row, good in zip(rows, finite.tolist(), strict=True) if not good}
            self.broken += [sample_ids[row] for row in sorted(broken)]

    def measured(
        self, process_group: ProcessGroup, made: OptimizerStep, *, with_reference: bool
    ) -> VelocityStepMetrics:
        """Return the means over the images of all processes."""
        loss, policy_loss, kl, norm, *own = (process_group.add(self.sums) / self.count).tolist()
        return self.metrics(
            loss=loss,
            policy_loss=policy_loss,
            grad_norm=made.grad_norm,
            learning_rate=made.learning_rate,
            kl=kl if with_reference else None,
            velocity_norm=norm if with_reference else None,
            **dict(zip(self._own, own, strict=True)),
        )


def update_by_velocity(
    component: VelocityComponent,
    optimizer: PolicyOptimizer,
    rows: RaggedRows | TrainingRows,
    settings: VelocitySettings,
    *,
    seed: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    on_progress: Progress | None = None,
) -> UpdateResult:
    """Train the component on finished images, one state per row; arguments and errors as of `update_policy`.

    The old policy, for methods that have one, is the component's copy of that name, if it keeps one before, or the
    policy before the update. Rows that other weights sampled are trained on unchanged, since no ratio relates them to
    the policy. Noise levels and noise are of the seed too.
    """
    if not len(rows):
        return UpdateResult({}, ())
    trained, size = component.trained, settings.rows_per_step(len(rows))
    component.prepare_for_update(rows.actions)
    with_old, metrics = settings.row.with_old, METRICS[type(settings.row)]
    process = ForwardProcess(component, rows, settings.timesteps_per_image, seed, shared_noise=settings.shared_noise)
    epoch_steps = -(-len(rows) // size)
    plan = [
        (indices, number // epoch_steps)
        for number, indices in enumerate(minibatches(len(rows), size, settings.epochs, seed))
    ]
    parts = [process.microbatches(indices, epoch, settings.micro_batch_size) for indices, epoch in plan]
    tick = counter(sum(len(share(each, process_group)) for each in parts), on_progress)

    def gradient(number: int) -> _Passes:
        optimizer.zero_grad()
        epoch, passes = plan[number][1], _Passes(process.levels * len(plan[number][0]), metrics)
        shares = share(parts[number], process_group)
        compared = _compared(component, process, [part for part, _ in shares], epoch, settings)
        for (part, counts), velocities in zip(shares, compared, strict=True):
            _backward(component, part, velocities, settings, passes, counts=counts)
            tick()
        passes.read(rows.sample_ids)
        return passes

    def step(number: int, passes: _Passes) -> VelocityStepMetrics:
        names = [rows.sample_ids[index] for index in plan[number][0]]
        made = optimizer_step(component, optimizer, names, passes.broken, settings, process_group)
        return passes.measured(process_group, made, with_reference=settings.with_reference)

    with no_gradient_of_a_refused_update(optimizer):
        # Until the first step the policy is the one before the update.
        passes = gradient(0)
        with keeping_old(component, needed=with_old and len(plan) > 1 and "old" not in trained.copies):
            steps = [step(0, passes)]
            steps += [step(number, gradient(number)) for number in range(1, len(plan))]
    return UpdateResult({}, tuple(steps))


@dataclass(frozen=True)
class _Compared:
    """Noised images with their velocities under the reference and the old policy; None where one is not compared."""

    actions: DenoisingBatch
    noised: NoisedImages
    reference: Float[Tensor, "rows ..."] | None
    old: Float[Tensor, "rows ..."] | None


def _compared(
    component: VelocityComponent,
    process: ForwardProcess,
    parts: Sequence[Sequence[Noising]],
    epoch: int,
    settings: VelocitySettings,
) -> Iterator[_Compared]:
    """Yield what each microbatch is trained on, with other weights exchanged once for many of them."""
    copies = component.trained.copies
    with_old = settings.row.with_old and "old" in copies
    for start in range(0, len(parts), BATCHES_PER_EXCHANGE):
        given = [process.noised(part, epoch) for part in parts[start : start + BATCHES_PER_EXCHANGE]]
        batches, none = [actions for actions, _ in given], [None] * len(given)
        # Before any graph is built: exchanging values would break it.
        reference = _under(component.trained.reference(), component, batches) if settings.with_reference else none
        old = _under(copies["old"].use(), component, batches) if with_old else none
        for (actions, noised), *velocities in zip(given, reference, old, strict=True):
            yield _Compared(actions, noised, *velocities)


def _backward(
    component: VelocityComponent,
    part: Sequence[Noising],
    given: _Compared,
    settings: VelocitySettings,
    passes: _Passes,
    *,
    counts: bool,
) -> None:
    """Add one microbatch's share of the minibatch gradient; one that does not count adds zeros."""
    velocity = component.velocities(given.actions)
    old = velocity.detach() if given.old is None else given.old
    terms = velocity_terms(velocity, old, given.noised.to(velocity), settings.row)
    kl = norm = torch.zeros_like(terms.policy)
    if given.reference is not None:
        kl = mean_square(velocity - given.reference)
        norm = (mean_square(velocity.detach()) / mean_square(given.reference)).sqrt()
    losses = terms.policy + settings.kl_coef * kl
    loss = losses.sum() / passes.count
    (loss if counts else loss * 0.0).backward()
    if not counts:
        return
    measured = (losses, terms.policy, kl, norm, *terms.measured)
    sums = torch.stack([values.detach() for values in measured]).double().sum(-1)
    passes.add([each.row for each in part], losses.isfinite(), sums)


@torch.no_grad()
def _under(
    weights: AbstractContextManager[Any], component: VelocityComponent, batches: Sequence[DenoisingBatch]
) -> list[Float[Tensor, "rows ..."]]:
    with weights:
        return [component.velocities(actions) for actions in batches]
