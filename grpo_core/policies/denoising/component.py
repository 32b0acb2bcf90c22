"""The denoising model as a component: it draws images with noisy steps, and scores steps that were stored."""

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from grpo_core.policies.denoising.rows import DenoisedGroup, SampleRows, by_group, image_of, slice_decoding
from grpo_core.policies.denoising.scheduler import (
    NoisyScheduler,
    ReplayScheduler,
    StartScheduler,
    Transition,
    VelocityScheduler,
    WindowScheduler,
    exchanged_scheduler,
    step_kl,
    step_logprob,
)
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.microbatches import by_length
from grpo_core.policies.trained.component import TrainedComponent
from grpo_core.policies.trained.model import BATCHES_PER_EXCHANGE, TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.actions import DenoisingBatch, Sources, TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import (
    ActionLogprobs,
    BrokenImage,
    Entropies,
    GroupRequest,
    SampledActions,
    StepGaussians,
    StepMeans,
    TrainingRows,
)
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import make_generator

VAE = "vae"
"""Name of the autoencoder among the parts of a pipeline, also that of diffusers."""


class DenoisingComponent(TrainedComponent[DenoisingBatch]):
    """The denoising model of a diffusers pipeline, whose other parts are frozen.

    The pipeline's own `__call__` denoises, with another scheduler in place of its own: noisy while sampling, and the
    stored steps while scoring. `trained.model` has to be the pipeline's denoising model, or peft's wrapper of it.
    """

    def __init__(
        self,
        pipeline: Any,
        settings: DenoisingSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
        offload: ComponentOffload = NO_OFFLOAD,
    ) -> None:
        self.offload = offload
        self.pipeline = pipeline
        self.settings = settings
        self.trained = trained
        self.autocast = autocast
        pipeline.set_progress_bar_config(disable=True)

    @property
    def one_prompt_per_call(self) -> bool:
        """Whether rows of other prompts in a call would change a row."""
        return False

    @abstractmethod
    def call_arguments(
        self,
        prompts: Sequence[str],
        drafts: TokenBatch | None,
        size: ImageSize,
        sources: tuple[SourceImage, ...] = (),
    ) -> Mapping[str, Any]:
        """Return the arguments of the pipeline's call for these rows, guidance included; it runs without gradients.

        Prompts have to be given as embeddings, or the text encoders run in every pass. `num_inference_steps`,
        `generator`, `latents` and `output_type` are added by the caller.

        Args:
            prompts: one per row; one and the same where there are sources.
            drafts: one per row; None for a pipeline without tokens.
            sources: the images in the prompt of the rows, in its order.
        """

    def calling(self, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context for a call of the pipeline with these arguments, while sampling and while scoring."""
        return nullcontext()

    def latents_argument(self, latents: Float[Tensor, "rows ..."], size: ImageSize) -> Float[Tensor, "rows ..."]:
        """Return latents of images of this size in the form of the pipeline's call, from that of its scheduler."""
        return latents

    def sample(
        self, requests: Sequence[GroupRequest], drafts: TokenBatch | None, *, size: ImageSize, rows_per_call: int
    ) -> list[DenoisedGroup]:
        """Draw the images of groups of one size and one window; a row depends on its own seeds alone.

        Pipelines with tokens have a draft for each sample, group after group. NonFiniteError names samples and step
        whose latents are not finite while noisy steps are recorded.
        """
        rows = SampleRows.of(requests, drafts)
        images: list[Image.Image | BrokenImage] = []
        sampled: list[SampledActions] = []
        self.prepare_for_sampling()
        with self.offload.using(*self.parts, VAE):
            # Images without noisy steps equal those of the exported pipeline, whose adapters are not merged.
            noisy = rows.window_start is not None and self.settings.sde_window_size > 0
            with self.trained.merged() if noisy and self.autocast is None else nullcontext():
                for part in self._calls(rows, rows_per_call):
                    levels, steps = self._denoise(rows.select(part), size)
                    images += [image_of(each) for each in levels]
                    sampled += [] if steps is None else [steps]
        return list(by_group(requests, images, sampled))

    def _calls(self, rows: SampleRows, rows_per_call: int) -> Iterator[range]:
        start = 0
        for _, run in itertools.groupby(map(self._shared, rows.prompts, _by_row(rows.sources, len(rows.prompts)))):
            stop = start + len(list(run))
            yield from (range(first, min(first + rows_per_call, stop)) for first in range(start, stop, rows_per_call))
            start = stop

    def _shared(self, prompt: str, sources: tuple[SourceImage, ...]) -> Hashable:
        """Return what rows of one call have in common: their source images, and with these the prompt."""
        return (prompt if sources or self.one_prompt_per_call else None), sources

    @torch.no_grad()
    def _denoise(self, rows: SampleRows, size: ImageSize) -> tuple[Any, SampledActions | None]:
        """Run the pipeline once; return levels in [0, 1] and the noisy steps."""
        generators = [make_generator(seed) for seed in rows.noise_seeds]
        arguments = {**self._arguments(rows.prompts, rows.drafts, size, rows.sources), "generator": generators}
        slice_decoding(self.pipeline, len(rows.prompts), size)
        with self._precision(), self.calling(arguments):
            if rows.window_start is None:
                return self.pipeline(**arguments, output_type="np").images, None
            scheduler = NoisyScheduler.like(self.pipeline.scheduler, self.settings)
            scheduler.begin(rows.window_start, rows.step_seeds, rows.sample_ids)
            if rows.window_start == 0:
                arguments["latents"] = self._rounded(self.start_latents(arguments))
            with exchanged_scheduler(self.pipeline, scheduler):
                levels = self.pipeline(**arguments, output_type="np").images
        scheduler.require_sound()
        return levels, self._sampled(rows, size, scheduler)

    def start_latents(self, arguments: Mapping[str, Any]) -> Float[Tensor, "rows ..."]:
        """Return the latents that the pipeline would start from, in the form in which its call takes them."""
        with exchanged_scheduler(self.pipeline, StartScheduler.like(self.pipeline.scheduler, self.settings)):
            latents: Tensor = self.pipeline(**arguments, output_type="latent").images
        return latents

    @staticmethod
    def _rounded(latents: Tensor) -> Tensor:
        """Return the first latents as they are stored before the first noisy step."""
        # Some pipelines start in 16 bits and continue in 32, whose latents are stored as fp16.
        return latents if latents.dtype == torch.float64 else latents.to(torch.float16).to(latents.dtype)

    def _sampled(self, rows: SampleRows, size: ImageSize, scheduler: NoisyScheduler) -> SampledActions:
        count = len(rows.prompts)
        return SampledActions(
            actions=DenoisingBatch(
                prompts=rows.prompts,
                states=tuple(torch.stack(scheduler.states, 1).cpu()),
                first_steps=(scheduler.window.start,) * count,
                sizes=(size,) * count,
                drafts=rows.drafts,
                sources=rows.sources,
            ),
            # An empty window has no log-probs to stack.
            rollout_logprobs=torch.stack(scheduler.logprobs, 1).cpu() if scheduler.logprobs else torch.zeros(count, 0),
            finished=torch.ones(count, dtype=torch.bool),
            max_length=len(scheduler.window),
        )

    def _parts_of(self, actions: DenoisingBatch) -> tuple[str, ...]:
        return (*self.parts, VAE) if actions.sources else self.parts

    def _score(
        self, model: nn.Module, actions: DenoisingBatch, *, entropy: Entropies, others: StepMeans | None = None
    ) -> ActionLogprobs:
        # `model` is the pipeline's own, whose adapters or values the caller has exchanged.
        calls = [self._call(actions, rows) for rows in self._alike(actions)]
        scored = [self._scored(call, self._transitions(call), others or StepMeans()) for call in calls]
        order = self._order(calls)
        logprobs, kls, *gaussians = (torch.cat(values)[order] for values in zip(*scored, strict=True))
        return ActionLogprobs(logprobs, None, kls, StepGaussians(*gaussians))

    def _scored(self, call: "_Call", steps: Sequence[Transition], others: StepMeans) -> list[Tensor]:
        """Return the fields of ActionLogprobs, then of StepGaussians, [rows, steps]; zero where nothing is compared."""
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
        none: list[None] = [None] * len(batches)
        old = self.trained.copies.get("old")
        references = self._means_under(self.trained.reference(), batches) if kl else none
        before = none if old is None else self._means_under(old.use(), batches)
        return [StepMeans(*each) for each in zip(references, before, strict=True)]

    @torch.no_grad()
    def _means_under(
        self, weights: AbstractContextManager[Any], batches: Sequence[DenoisingBatch]
    ) -> list[tuple[Tensor, ...]]:
        with self.offload.using(*self._parts_of(batches[0])), weights:
            return [self._means(actions) for actions in batches]

    def _means(self, actions: DenoisingBatch) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for call in (self._call(actions, rows) for rows in self._alike(actions)):
            means = torch.stack([step.mean for step in self._transitions(call)], 1)
            found |= zip(call.rows, means, strict=True)
        return tuple(found[row] for row in range(len(actions)))

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
        shared = map(self._shared, actions.prompts, _by_row(actions.sources, len(actions)))
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
        # Pipelines that continue in fp32 have states in fp16, and do not all cast what they are given.
        before = call.states[0]
        latents = self.latents_argument(before.float() if before.dtype == torch.float16 else before, call.size)
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

    @torch.no_grad()
    def _arguments(
        self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize, sources: Sources | None
    ) -> dict[str, Any]:
        shared = sources[0] if sources else ()
        steps = {"num_inference_steps": self.settings.num_inference_steps}
        return {**self.call_arguments(prompts, drafts, size, shared), **steps}


def _by_row(sources: Sources | None, rows: int) -> Sources:
    return ((),) * rows if sources is None else sources


@dataclass(frozen=True)
class _Call:
    """Rows that the pipeline scores at once: their places in the batch, and what they have in common."""

    rows: list[int]
    arguments: Mapping[str, Any]
    size: ImageSize
    first_step: int
    states: Float[Tensor, "states rows ..."]
