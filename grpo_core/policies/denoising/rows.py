"""The rows of a pipeline's calls, and images of latents."""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image

from grpo_core.rollouts.actions import DenoisingBatch, Rows, Sources, TokenBatch, join_sources
from grpo_core.rollouts.records import BrokenImage, GroupRequest, SampledActions
from grpo_core.rollouts.streams import PIXELS_AT_ONCE, ImageSize


@contextmanager
def only_errors() -> Iterator[None]:
    """Have diffusers and transformers log no warnings: they warn of cut prompts also where nobody wrote the prompt."""
    levels = diffusers.utils.logging.get_verbosity(), transformers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers.utils.logging.set_verbosity(levels[0])
        transformers.utils.logging.set_verbosity(levels[1])


@dataclass(frozen=True)
class DenoisedGroup:
    """The images of one group, and their noisy steps; None where the group was denoised by the ODE."""

    images: tuple[Image.Image | BrokenImage, ...]
    sampled: SampledActions | None


@dataclass(frozen=True)
class SampleRows(Rows):
    """The samples of several groups, one after another.

    Attributes:
        noise_seeds: of the first latents.
        step_seeds: of the noisy steps; empty without them.
        window_start: index of the first noisy step; None: every step is deterministic.
        drafts: the tokens that the images are made of; None for a pipeline without tokens.
        sources: the images in the prompts; None: no prompt has any.
    """

    prompts: tuple[str, ...]
    sample_ids: tuple[str, ...]
    noise_seeds: tuple[int, ...]
    step_seeds: tuple[int, ...]
    window_start: int | None
    drafts: TokenBatch | None
    sources: Sources | None

    @classmethod
    def of(cls, requests: Sequence[GroupRequest], drafts: TokenBatch | None) -> "SampleRows":
        """Return the samples of these groups, which share one window."""
        (window_start,) = {request.window_start for request in requests}
        return cls(
            prompts=tuple(request.prompt for request in requests for _ in request.sample_ids),
            sample_ids=tuple(itertools.chain(*(request.sample_ids for request in requests))),
            noise_seeds=tuple(itertools.chain(*(request.noise_seeds for request in requests))),
            step_seeds=tuple(itertools.chain(*(request.step_seeds for request in requests))),
            window_start=window_start,
            drafts=drafts,
            sources=join_sources(
                [
                    (len(request.sample_ids), (request.sources,) * len(request.sample_ids) if request.sources else None)
                    for request in requests
                ]
            ),
        )

    def first_alike(self) -> list[int]:
        """Return by row the first one with its prompt, source images, draft and noise, of which the ODE makes the same.

        They differ from the first noisy step on.
        """
        drafts: list[Hashable] = [None] * len(self.prompts)
        if self.drafts is not None:
            drafts = [tuple(ids) for ids in self.drafts.token_ids.where(self.drafts.loss_mask, -1).tolist()]
        sources = ((),) * len(self.prompts) if self.sources is None else self.sources
        seen: dict[Hashable, int] = {}
        keys = zip(self.prompts, sources, drafts, self.noise_seeds, strict=True)
        return [seen.setdefault(key, row) for row, key in enumerate(keys)]


def by_group(
    requests: Sequence[GroupRequest], images: Sequence[Image.Image | BrokenImage], sampled: Sequence[SampledActions]
) -> Iterator[DenoisedGroup]:
    """Cut the rows of all calls into groups again."""
    joined = _joined(sampled) if sampled else None
    start = 0
    for request in requests:
        rows = range(start, start + len(request.sample_ids))
        own = None if joined is None else joined.select(rows)
        yield DenoisedGroup(tuple(images[row] for row in rows), own)
        start = rows.stop


def _joined(sampled: Sequence[SampledActions]) -> SampledActions:
    return SampledActions(
        actions=DenoisingBatch.join([each.actions for each in sampled if isinstance(each.actions, DenoisingBatch)]),
        rollout_logprobs=torch.cat([each.rollout_logprobs for each in sampled]),
        finished=torch.cat([each.finished for each in sampled]),
        max_length=sampled[0].max_length,
    )


def slice_decoding(pipeline: Any, images: int, size: ImageSize) -> None:
    """Let the pipeline's autoencoder decode this many images at once if they are small, else one by one."""
    vae: Any = getattr(pipeline, "vae", None)
    if hasattr(vae, "use_slicing"):
        vae.use_slicing = images * size.pixels > PIXELS_AT_ONCE


def image_of(levels: Float[np.ndarray, "height width 3"]) -> Image.Image | BrokenImage:
    """Convert levels in [0, 1] to an image; NaN is detected here, because 8-bit levels cannot represent it."""
    broken = ~np.isfinite(levels).all(-1)
    image: Image.Image
    (image,) = VaeImageProcessor.numpy_to_pil(np.where(broken[..., None], 0.0, levels)[None])
    if not broken.any():
        return image
    return BrokenImage(image, f"{broken.mean():.1%} of the pixels are not numbers")
