"""The denoising model while it samples: calls of the pipeline that draw images with noisy steps."""

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from grpo_core.policies.denoising.rows import DenoisedGroup, SampleRows, by_group, image_of, slice_decoding
from grpo_core.policies.denoising.scheduler import NoisyScheduler, OdeScheduler, StartScheduler, exchanged_scheduler
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.trained.component import TrainedComponent
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.actions import DenoisingBatch, Sources, TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.records import BrokenImage, GroupRequest, SampledActions
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import make_generator

VAE = "vae"
"""Name of the autoencoder among the parts of a pipeline, also that of diffusers."""


class DenoisingSampler(TrainedComponent[DenoisingBatch]):
    """The denoising model of a diffusers pipeline, whose other parts are frozen.

    The pipeline's own `__call__` denoises, with a noisy scheduler in place of its own. `trained.model` has to be the
    pipeline's denoising model, or peft's wrapper of it.
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
                starts = self._window_starts(rows, size, rows_per_call)
                for part in self._calls(rows, rows_per_call):
                    own = None if starts is None else starts[part.start : part.stop]
                    levels, steps = self._denoise(rows.select(part), size, own)
                    images += [image_of(each) for each in levels]
                    sampled += [] if steps is None else [steps]
        return list(by_group(requests, images, sampled))

    def _calls(self, rows: SampleRows, rows_per_call: int) -> Iterator[range]:
        start = 0
        for _, run in itertools.groupby(map(self._shared, rows.prompts, by_row(rows.sources, len(rows.prompts)))):
            stop = start + len(list(run))
            yield from (range(first, min(first + rows_per_call, stop)) for first in range(start, stop, rows_per_call))
            start = stop

    def _shared(self, prompt: str, sources: tuple[SourceImage, ...]) -> Hashable:
        """Return what rows of one call have in common: their source images, and with these the prompt."""
        return (prompt if sources or self.one_prompt_per_call else None), sources

    @torch.no_grad()
    def _window_starts(self, rows: SampleRows, size: ImageSize, rows_per_call: int) -> Float[Tensor, "rows ..."] | None:
        """Return the latents before the window, computed once for all rows that start alike; None: nothing is shared.

        They are in the form of the scheduler, in the dtype they are stored in.
        """
        if not self.settings.branch or not rows.window_start:
            return None
        first = rows.first_alike()
        leading = rows.select(chosen := list(dict.fromkeys(first)))
        found = []
        for part in (leading.select(part) for part in self._calls(leading, rows_per_call)):
            scheduler = NoisyScheduler.like(self.pipeline.scheduler, self.settings)
            scheduler.begin(rows.window_start, part.step_seeds, part.sample_ids, kept=slice(rows.window_start))
            arguments = self._sampling_arguments(part, size)
            with self._precision(), self.calling(arguments), exchanged_scheduler(self.pipeline, scheduler):
                self.pipeline(**arguments, output_type="latent")
            scheduler.require_sound()
            found.append(scheduler.states[0])
        return torch.cat(found)[[chosen.index(row) for row in first]]

    def _sampling_arguments(self, rows: SampleRows, size: ImageSize) -> dict[str, Any]:
        generators = [make_generator(seed) for seed in rows.noise_seeds]
        return {**self._arguments(rows.prompts, rows.drafts, size, rows.sources), "generator": generators}

    @torch.no_grad()
    def _denoise(
        self, rows: SampleRows, size: ImageSize, starts: Float[Tensor, "rows ..."] | None = None
    ) -> tuple[Any, SampledActions | None]:
        """Run the pipeline once, from the latents before the window if they are known.

        Returned are levels in [0, 1] and the noisy steps.
        """
        arguments = self._sampling_arguments(rows, size)
        slice_decoding(self.pipeline, len(rows.prompts), size)
        with self._precision(), self.calling(arguments):
            if rows.window_start is None:
                return self._by_the_ode(arguments), None
            scheduler = NoisyScheduler.like(self.pipeline.scheduler, self.settings)
            left = slice(None if starts is None else rows.window_start, None)
            scheduler.begin(rows.window_start, rows.step_seeds, rows.sample_ids, kept=left)
            if starts is not None:
                arguments["latents"] = self._given_latents(starts, size)
            elif rows.window_start == 0:
                arguments["latents"] = self._rounded(self.start_latents(arguments))
            with exchanged_scheduler(self.pipeline, scheduler):
                levels = self.pipeline(**arguments, output_type="np").images
        scheduler.require_sound()
        return levels, self._sampled(rows, size, scheduler)

    def _by_the_ode(self, arguments: Mapping[str, Any]) -> Any:
        # Euler's steps are those of the pipeline's own scheduler.
        solver = None if self.settings.solver == "euler" else OdeScheduler.like(self.pipeline.scheduler, self.settings)
        with nullcontext() if solver is None else exchanged_scheduler(self.pipeline, solver):
            return self.pipeline(**arguments, output_type="np").images

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

    def _given_latents(self, stored: Float[Tensor, "rows ..."], size: ImageSize) -> Float[Tensor, "rows ..."]:
        """Return stored latents as the pipeline's call takes them."""
        # Pipelines that continue in fp32 have states in fp16, and do not all cast what they are given.
        return self.latents_argument(stored.float() if stored.dtype == torch.float16 else stored, size)

    @torch.no_grad()
    def _arguments(
        self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize, sources: Sources | None
    ) -> dict[str, Any]:
        shared = sources[0] if sources else ()
        steps = {"num_inference_steps": self.settings.num_inference_steps}
        return {**self.call_arguments(prompts, drafts, size, shared), **steps}


def by_row(sources: Sources | None, rows: int) -> Sources:
    """Return the sources of each of so many rows."""
    return ((),) * rows if sources is None else sources
