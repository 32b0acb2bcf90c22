"""The transformer of a pipeline as a component: what the call of its class is given for a row."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.sampling import VAE
from grpo_core.policies.diffusers.prompt_cache import PromptCache
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings, SavedPipeline, call_settings
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch
from grpo_core.rollouts.images import SourceImage, without_marks
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import make_generator

TRANSFORMER, ENCODERS = "transformer", "text_encoder"
"""Name of the part of a pipeline that is trained; beginning of the names of those that encode prompts."""


class DiffusersDenoising(DenoisingComponent):
    """The transformer of a pipeline, which makes all denoising steps."""

    settings: DiffusersSettings
    parts = (TRANSFORMER,)

    def __init__(
        self,
        pipeline: Any,
        saved: SavedPipeline,
        settings: DiffusersSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
        offload: ComponentOffload = NO_OFFLOAD,
    ) -> None:
        super().__init__(pipeline, settings, trained, autocast=autocast, offload=offload)
        self.saved = saved
        self.prompts = PromptCache(pipeline, encoding=self._encoding)
        if saved.pipeline_class.sources is not None:
            _encode_in_own_dtype(pipeline.vae)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """Encode prompts as the calls that sample and score do, also where they are encoded ahead of these."""
        encoders = [name for name in self.saved.parts if name.startswith(ENCODERS)]
        with self.offload.using(*encoders), self._precision():
            yield

    def prepare_for_update(self, actions: DenoisingBatch | None = None) -> None:
        """Enter the mode for gradients; with offloaded parts the prompts are encoded before the first pass."""
        super().prepare_for_update(actions)
        if actions is not None:
            sources = actions.sources or ((),) * len(actions)
            self.encode_ahead(zip(actions.prompts, sources, actions.sizes, strict=True))

    def encode_ahead(self, rows: Iterable[tuple[str, tuple[SourceImage, ...], ImageSize]]) -> None:
        """Encode prompts of rows, equal ones once, before the transformer takes the text encoders' place on the device.

        Without offloaded parts nothing is done: the first call with a prompt encodes it.
        """
        if not self.offload.enabled:
            return
        distinct = dict.fromkeys(rows)
        encoding_images = (VAE,) if any(sources for _, sources, _ in distinct) else ()
        # Where all are known from before, nothing is moved.
        with self.offload.using(*encoding_images, evict=False):
            # It encodes prompts of its own; calls with source images do not ask for it.
            _ = encoding_images or self.prompts.pads_to_one_length
            for prompt, sources, size in distinct:
                # Two rows: what several rows of a call have in common is found out with the first of them.
                arguments = self._arguments((prompt,) * 2, None, size, (sources,) * 2)
                super().start_latents({**arguments, "generator": [make_generator(0) for _ in range(2)]})

    @property
    def one_prompt_per_call(self) -> bool:
        """Whether embeddings of several prompts would have to be padded, so that a row would depend on the others."""
        return not self.prompts.pads_to_one_length

    def call_arguments(
        self,
        prompts: Sequence[str],
        drafts: TokenBatch | None,
        size: ImageSize,
        sources: tuple[SourceImage, ...] = (),
    ) -> Mapping[str, Any]:
        """Return the arguments of the pipeline's call for these rows; InputError if a source image is broken."""
        edited, texts = self._source_arguments(sources, prompts, size)
        given = call_settings(self.saved, self.settings)
        # Some pipelines want as many negative prompts as prompts.
        by_row = {name: [value] * len(texts) for name, value in given.items() if isinstance(value, str)}
        fixed = {**self.saved.pipeline_class.fixed_arguments(size), **edited}
        return {**given, **by_row, **fixed, "prompt": texts, "height": size.height, "width": size.width}

    def _source_arguments(
        self, sources: tuple[SourceImage, ...], prompts: Sequence[str], size: ImageSize
    ) -> tuple[dict[str, Any], list[str]]:
        """Return what a call with these source images is given beside the prompts, and its prompts."""
        if not sources:
            return {}, list(prompts)
        argument = self.saved.pipeline_class.sources
        assert argument is not None, "prompts with images were refused"
        edited = {"image": argument.argument(sources, size), "num_images_per_prompt": len(prompts)}
        return edited, [without_marks(prompts[0])]

    def latents_argument(self, latents: Float[Tensor, "rows ..."], size: ImageSize) -> Float[Tensor, "rows ..."]:
        """Return latents in the form in which the pipeline's call takes them, from that of its scheduler."""
        unit = self.saved.pixel_unit
        if not self.saved.pipeline_class.spatial_latents or unit is None:
            return latents
        unpacked: Tensor = latents.transpose(1, 2).unflatten(2, (size.height // unit, size.width // unit))
        return unpacked

    def start_latents(self, arguments: Mapping[str, Any]) -> Float[Tensor, "rows ..."]:
        """Return the latents that the pipeline would start from, in the form in which its call takes them."""
        if not self.saved.pipeline_class.spatial_latents:
            return super().start_latents(arguments)
        # What such a pipeline returns as latents is in a third form.
        prepare, prepared = self.pipeline.prepare_latents, []

        def keep(*args: Any, **kwargs: Any) -> Any:
            prepared.append(prepare(*args, **kwargs))
            return prepared[0]

        self.pipeline.prepare_latents = keep
        try:
            super().start_latents(arguments)
        finally:
            del self.pipeline.prepare_latents
        return self.latents_argument(prepared[0][0], ImageSize(arguments["width"], arguments["height"]))


def _encode_in_own_dtype(vae: Any) -> None:
    """Let an autoencoder take images of any dtype: Z-Image Omni gives it bfloat16, whatever its weights are."""
    encode = vae.encode
    vae.encode = lambda pixels, *args, **kwargs: encode(pixels.to(vae.dtype), *args, **kwargs)
