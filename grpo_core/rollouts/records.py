"""The data that passes between the stages, as frozen records of tensors with one row per sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from grpo_core.rollouts.actions import Actions, Rows, TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize, Stream


@dataclass(frozen=True)
class BrokenImage:
    """A decoded image in which some pixels are not numbers, with those black, and how much of it that is."""

    image: Image.Image
    reason: str


Output = Image.Image | BrokenImage | str
"""What a row of tokens becomes: an image, or a text."""

Entropies = Literal["none", "constant", "differentiable"]
"""How entropies are computed beside log-probs: not at all, as zeros; as numbers; or with gradients."""


@dataclass(frozen=True)
class SampledActions(Rows):
    """The actions of one stream as they were sampled.

    Attributes:
        rollout_logprobs: log-prob of each action under the distribution it was sampled from, nats, fp32; zero where the
            loss mask is False. Of a denoising step: the mean, or the sum, over the dimensions of the latents.
        finished: False for a row that was truncated at its maximum length.
        max_length: maximum number of actions of a row by the settings, whatever the sizes of the rows' images: the
            constant that some losses divide by.
    """

    actions: Actions
    rollout_logprobs: Float[Tensor, "batch time"]
    finished: Bool[Tensor, " batch"]
    max_length: int


@dataclass(frozen=True)
class SampledTokens(SampledActions):
    """Tokens as they were sampled, and the number of ids that the model read before the first of each row."""

    actions: TokenBatch
    prompt_lengths: Int[Tensor, " batch"]

    def select(self, rows: Sequence[int]) -> "SampledTokens":
        """Return the rows with these indices, in this order, without columns that are padding in all of them."""
        chosen = super().select(rows)
        tokens = chosen.actions.trimmed()
        return replace(chosen, actions=tokens, rollout_logprobs=chosen.rollout_logprobs[:, : tokens.token_ids.shape[1]])


@dataclass(frozen=True)
class StepGaussians:
    """The Gaussians that denoising steps are drawn from, and how far an update has moved them, all in fp32.

    Attributes:
        drift: KL(policy || policy before the update) in closed form, nats, reduced over the latents' values like the
            log-prob, with gradient; zero if no means were given, as before the first optimizer step.
        std: of each value of the latents.
        dt: length of the step, the difference of its sigmas; positive.
    """

    drift: Float[Tensor, "batch steps"]
    std: Float[Tensor, "batch steps"]
    dt: Float[Tensor, "batch steps"]


@dataclass(frozen=True)
class StepMeans:
    """The means of the Gaussians of stored denoising steps under other weights, as of one [steps, *latent] per row.

    None where they are not compared: `reference`, and `old`, the policy before the update. `reference_speeds` are the
    root mean squares of the reference's velocities, [steps] per row.
    """

    reference: tuple[Tensor, ...] | None = None
    reference_speeds: tuple[Tensor, ...] | None = None
    old: tuple[Tensor, ...] | None = None

    def at_step(self, step: int) -> "StepMeans":
        """Return those of one step, as of rows that have no other."""
        known = (self.reference, self.reference_speeds, self.old)
        return StepMeans(*(rows and tuple(each[step : step + 1] for each in rows) for rows in known))


@dataclass(frozen=True)
class ActionLogprobs:
    """Log-probs of given actions under a policy, in fp32; zero where the loss mask is False.

    Attributes:
        logprobs: nats.
        entropy: of the distribution each action was sampled from, nats; zero everywhere if none was requested, None
            where no weight can change it, as of denoising steps.
        kl: KL(policy || reference) of these distributions in closed form; zero everywhere if no means were given.
        gaussians: of denoising steps; None for tokens.
        velocity_norm: of denoising steps, the norm of the velocity over the reference's; None without its means.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, "batch time"]
    gaussians: StepGaussians | None = None
    velocity_norm: Float[Tensor, "batch time"] | None = None


@dataclass(frozen=True)
class TrainingRows(SampledActions):
    """The stored actions of one stream joined with their advantages: the input of one update of its component.

    Attributes:
        advantages: finite.
        on_policy: whether the weights before the update are those that sampled the row.
        old_logprobs: under the weights before the update; None until they are computed, like the following.
        old_entropy: of the same distributions, nats; None also if not needed.
        ref_logprobs: under the reference; None also without one.
        prompt_lengths: ids that the model read before the first of each row's tokens; None where nobody counted them.
    """

    sample_ids: tuple[str, ...]
    advantages: Float[Tensor, " batch"]
    on_policy: Bool[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch time"] | None = None
    old_entropy: Float[Tensor, "batch time"] | None = None
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    prompt_lengths: Int[Tensor, " batch"] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the number of actions of these rows."""
        found: list[int] = self.actions.loss_mask[indices].sum(-1).tolist()
        return found


@dataclass(frozen=True)
class GroupRequest:
    """One prompt occurrence to be sampled.

    Attributes:
        seeds: for the token sampling, one per sample; samples with equal seeds are renderings of one draft.
        noise_seeds: for a decoder's first latents, one per sample; often equal for all of them.
        step_seeds: for the noise of the denoising steps, one per sample; empty without noisy steps.
        size: of the images; None: texts, or images of the size in the policy's settings.
        window_start: index of the first noisy denoising step; None: all are deterministic, and none is recorded.
        sources: the images in the prompt, in its order.
    """

    prompt: str
    sample_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    noise_seeds: tuple[int, ...]
    step_seeds: tuple[int, ...] = ()
    size: ImageSize | None = None
    window_start: int | None = None
    sources: tuple[SourceImage, ...] = ()


@dataclass(frozen=True)
class ComparedLogprobs:
    """Log-probs of the same actions under the policy that sampled them and under its reference, of one pass each."""

    scored: Float[Tensor, "samples time"]
    reference: Float[Tensor, "samples time"]


@dataclass(frozen=True)
class RolloutGroup:
    """The samples of one prompt occurrence.

    Attributes:
        streams: the actions by stream, one row per sample; renderings of one draft have equal tokens.
        outputs: the finished images or texts.
        compared: by stream, for a KL inside the reward; empty unless requested.
    """

    request: GroupRequest
    streams: Mapping[Stream, SampledActions]
    outputs: tuple[Output, ...]
    compared: Mapping[Stream, ComparedLogprobs] = field(default_factory=dict)
