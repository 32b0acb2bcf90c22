"""A prompt occurrence to be sampled, and the samples that were made for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from grpo_core.image_size import ImageSize
from grpo_core.records import Output, SampledActions
from grpo_core.streams import Stream


@dataclass(frozen=True)
class GroupRequest:
    """One prompt occurrence to be sampled.

    Attributes:
        prompt: its text.
        sample_ids: one per sample.
        seeds: for the token sampling, one per sample; samples with equal seeds are renderings of one draft.
        noise_seeds: for a decoder's first latents, one per sample; often equal for all of them.
        step_seeds: for the noise of the denoising steps, one per sample; empty without noisy steps.
        size: of the images; None: texts, or images of the size in the policy's settings.
        window_start: index of the first noisy denoising step; None: every step is deterministic, and no denoising step
            is recorded.
    """

    prompt: str
    sample_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    noise_seeds: tuple[int, ...]
    step_seeds: tuple[int, ...] = ()
    size: ImageSize | None = None
    window_start: int | None = None


@dataclass(frozen=True)
class ComparedLogprobs:
    """Log-probs of the same actions under the policy that sampled them and under its reference, of one pass each.

    Attributes:
        scored: under the policy.
        reference: under the reference.
    """

    scored: Float[Tensor, "samples time"]
    reference: Float[Tensor, "samples time"]


@dataclass(frozen=True)
class RolloutGroup:
    """The samples of one prompt occurrence.

    Attributes:
        request: what was sampled.
        streams: the actions by stream, each with one row per sample; renderings of one draft have equal tokens.
        outputs: the finished images or texts, one per sample.
        compared: by stream, for a KL inside the reward; empty unless requested.
    """

    request: GroupRequest
    streams: Mapping[Stream, SampledActions]
    outputs: tuple[Output, ...]
    compared: Mapping[Stream, ComparedLogprobs] = field(default_factory=dict)
