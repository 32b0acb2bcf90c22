"""The denoising model as a component: beside drawing images, it scores steps that were stored."""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from grpo_core.policies.denoising.sampling import VAE, DenoisingSampler, by_row
from grpo_core.policies.denoising.scheduler import (
    ReplayScheduler,
    StartScheduler,
    Transition,
    VelocityScheduler,
    WindowScheduler,
    exchanged_scheduler,
    step_kl,
    step_logprob,
)
from grpo_core.policies.microbatches import by_length
from grpo_core.policies.trained.model import BATCHES_PER_EXCHANGE
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import (
    ActionLogprobs,
    Entropies,
    StepGaussians,
    StepMeans,
    TrainingRows,
)
from grpo_core.rollouts.streams import ImageSize


class DenoisingComponent(DenoisingSampler):
    """The denoising model of a diffusers pipeline, which also scores stored steps.

    The pipeline's own `__call__` runs again, over a scheduler that answers each step with the stored latents.
    """

    def _parts_of(self, actions: DenoisingBatch) -> tuple[str, ...]:
        return (*self.parts, VAE) if actions.sources else self.parts

    def _score(
        self, model: nn.Module, actions: DenoisingBatch, *, entropy: Entropies, others: StepMeans | None = None
    ) -> ActionLogprobs:
        # `model` is the pipeline's own, whose adapters or values the caller has exchanged.
        calls = [self._call(actions, rows) for rows in self._alike(actions)]
        scored = [self._scored(call, self._transitions(call), others or StepMeans()) for call in calls]
        order = self._order(calls)
        logprobs, kls, drift, std, dt, *norm = (torch.cat(values)[order] for values in zip(*scored, strict=True))
        return ActionLogprobs(logprobs, None, kls, StepGaussians(drift, std, dt), *norm)

    def _scored(self, call: "_Call", steps: Sequence[Transition], others: StepMeans) -> list[Tensor]:
        """Return the fields of ActionLogprobs, then of StepGaussians, [rows, steps]; zero where nothing is compared.

        With the reference's velocities, the ratios to their norms follow.
        """
        reduction, zeros = self.settings.logprob_reduction, torch.zeros(len(call.rows), device=self._device)

        def distances(means: tuple[Tensor, ...] | None) -> list[Tensor]:
            if means is None:
                return [zeros] * len(steps)
            # All weights have one schedule, and so one standard deviation.
            of_steps = torch.stack([means[row] for row in call.rows], 1)
            given = zip(steps, of_steps, strict=True)
            return [step_kl(step.mean, step._replace(mean=mean), reduction) for step, mean in given]

        by_step = [
            [step_logprob(call.states[index + 1], step, reduction) for index, step in enumerate(steps)],
            distances(others.reference),
            distances(others.old),
            [step.std.expand_as(zeros) for step in steps],
            [step.dt.expand_as(zeros) for step in steps],
        ]
        if (speeds := others.reference_speeds) is not None:
            of_steps = torch.stack([speeds[row] for row in call.rows], 1)
            by_step.append([step.speed / speed for step, speed in zip(steps, of_steps, strict=True)])
        return [torch.stack(values, 1) for values in by_step]

    def compared(self, batches: Iterable[TrainingRows], *, kl: bool) -> Iterator[tuple[TrainingRows, StepMeans | None]]:
        """Yield each batch with the means of its steps under the other weights, exchanged once for many batches."""
        left = iter(batches)
        while together := list(itertools.islice(left, BATCHES_PER_EXCHANGE)):
            # Before any graph is built: exchanging values would break it.
            actions = [each.actions for each in together if isinstance(each.actions, DenoisingBatch)]
            yield from zip(together, self.step_means(actions, kl=kl), strict=True)

    def step_means(self, batches: Sequence[DenoisingBatch], *, kl: bool) -> list[StepMeans]:
        """Return by batch the means under the reference, with `kl`, and under the policy before the update, if kept."""
        none: list[tuple[None, None]] = [(None, None)] * len(batches)
        old = self.trained.copies.get("old")
        references = self._means_under(self.trained.reference(), batches, speeds=True) if kl else none
        before = none if old is None else self._means_under(old.use(), batches)
        return [StepMeans(*reference, old) for reference, (old, _) in zip(references, before, strict=True)]

    @torch.no_grad()
    def _means_under(
        self, weights: AbstractContextManager[Any], batches: Sequence[DenoisingBatch], *, speeds: bool = False
    ) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]]:
        """Return by batch the means of each row's steps, and if asked for the root mean squares of their velocities."""
        with self.offload.using(*self._parts_of(batches[0])), weights:
            return [self._means(actions, speeds=speeds) for actions in batches]

    def _means(self, actions: DenoisingBatch, *, speeds: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        means, found = dict[int, Tensor](), dict[int, Tensor]()
        for call in (self._call(actions, rows) for rows in self._alike(actions)):
            steps = self._transitions(call)
            means |= zip(call.rows, torch.stack([step.mean for step in steps], 1), strict=True)
            if speeds:
                found |= zip(call.rows, torch.stack([step.speed for step in steps], 1), strict=True)
        rows = range(len(actions))
        return tuple(means[row] for row in rows), tuple(found[row] for row in rows) if speeds else None

    def summed_values(self, actions: DenoisingBatch) -> int:
        """Return the number of values of a row's latents, the largest of all rows; 1 for means."""
        if self.settings.logprob_reduction == "mean":
            return 1
        return max((states[0].numel() for states in actions.states), default=1)

    def _call(self, actions: DenoisingBatch, rows: list[int]) -> "_Call":
        part = actions.select(rows)
        arguments = self._arguments(part.prompts, part.drafts, part.sizes[0], part.sources)
        states = torch.stack(part.states, 1).to(self._device, non_blocking=True)
        # States first: each is contiguous, as while sampling. Some products in 16 bits round differently over strides.
        return _Call(rows, arguments, part.sizes[0], part.first_steps[0], states)

    def _alike(self, actions: DenoisingBatch) -> list[list[int]]:
        """Group rows that one call can score."""
        found: dict[Hashable, list[int]] = {}
        for row, key in enumerate(self._keys(actions)):
            found.setdefault(key, []).append(row)
        return list(found.values())

    def _keys(self, actions: DenoisingBatch) -> list[Hashable]:
        """Return by row what rows of one call have in common: size and window, and all that `_shared` names."""
        shared = map(self._shared, actions.prompts, by_row(actions.sources, len(actions)))
        return list(zip(actions.sizes, actions.first_steps, shared, strict=True))

    def microbatches(self, rows: RaggedRows, indices: Sequence[int], size: int) -> list[list[int]]:
        """Cut rows into microbatches; those of one call of the pipeline are neighbours, but not on a CPU."""
        if self._device.type == "cpu":
            return super().microbatches(rows, indices, size)
        assert isinstance(rows.actions, DenoisingBatch), "a component has its own kind of actions"
        keys = self._keys(rows.actions)
        return by_length(rows.lengths(indices), size, [keys[row] for row in indices])

    def _transitions(self, call: "_Call") -> list[Transition]:
        scheduler = ReplayScheduler.like(self.pipeline.scheduler, self.settings).begin(call.first_step, call.states)
        self._run(call, scheduler)
        return scheduler.transitions

    def _run(self, call: "_Call", scheduler: WindowScheduler) -> None:
        """Run the pipeline from the first states on; with gradients where they are enabled."""
        latents = self._given_latents(call.states[0], call.size)
        # Pipelines are called under no_grad; this is the function below the decorator.
        run: Any = vars(type(self.pipeline))["__call__"].__wrapped__
        with exchanged_scheduler(self.pipeline, scheduler), self._precision(), self.calling(call.arguments):
            run(self.pipeline, **call.arguments, latents=latents, output_type="latent")

    def velocities(self, actions: DenoisingBatch) -> Float[Tensor, "batch ..."]:
        """Return the derivative of each row's first state by sigma at its first step, guidance included.

        It is what the pipeline gives to its scheduler, in fp32 or wider; with gradients where they are enabled. The
        actions are of one size.
        """
        found = []
        with self.offload.using(*self._parts_of(actions)):
            calls = [self._call(actions, rows) for rows in self._alike(actions)]
            for call in calls:
                scheduler = VelocityScheduler.like(self.pipeline.scheduler, self.settings).begin(call.first_step)
                self._run(call, scheduler)
                found.append(scheduler.velocity.to(torch.promote_types(scheduler.velocity.dtype, torch.float32)))
            return torch.cat(found)[self._order(calls)]

    @torch.no_grad()
    def sigmas(self, actions: DenoisingBatch) -> Float[Tensor, " steps"]:
        """Return the noise level before each denoising step of these rows, which are of one size, on the CPU."""
        scheduler = StartScheduler.like(self.pipeline.scheduler, self.settings)
        with self.offload.using(*self._parts_of(actions)):
            self._run(self._call(actions, [0]), scheduler)
        levels: Tensor = scheduler.sigmas[:-1]
        return levels.cpu()

    def _order(self, calls: Sequence["_Call"]) -> Int[Tensor, " batch"]:
        """Return what puts the rows of all calls, one after another, into the order of the batch."""
        order = torch.tensor([row for call in calls for row in call.rows]).argsort()
        return order.to(self._device, non_blocking=True)


@dataclass(frozen=True)
class _Call:
    """Rows that the pipeline scores at once: their places in the batch, and what they have in common."""

    rows: list[int]
    arguments: Mapping[str, Any]
    size: ImageSize
    first_step: int
    states: Float[Tensor, "states rows ..."]
