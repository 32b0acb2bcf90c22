"""The data that passes between the stages, as frozen records of tensors with one row per sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from grpo_core.streams import ImageSize, Stream


@dataclass(frozen=True)
class BrokenImage:
    """A decoded image in which some pixels are not numbers.

    Attributes:
        image: with those pixels black.
        reason: how much of it is broken.
    """

    image: Image.Image
    reason: str


Output = Image.Image | BrokenImage | str
"""What a row of tokens becomes: an image, or a text."""

Entropies = Literal["none", "constant", "differentiable"]
"""How entropies are computed beside log-probs: not at all, as zeros; as numbers; or with gradients."""


def pad_to_longest(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [rows, time] tensors of unequal lengths along their rows, with zeros on the right."""
    time = max((part.shape[1] for part in parts), default=0)
    padded = [torch.nn.functional.pad(part, (0, time - part.shape[1])) for part in parts]
    return torch.cat(padded) if padded else torch.zeros(0, 0)


@dataclass(frozen=True)
class TokenSupport:
    """The ids that a truncated sampler could choose at each token; log-probs are over these only.

    Attributes:
        ids: of all tokens one after another, row by row, ascending within a token.
        counts: how many of them belong to each token; zero where the loss mask is False.
    """

    ids: Int[Tensor, " entries"]
    counts: Int[Tensor, "batch time"]

    def __post_init__(self) -> None:
        assert int(self.counts.sum()) == len(self.ids), "every id belongs to a token"

    def select(self, rows: Sequence[int]) -> "TokenSupport":
        """Return the support of the rows with these indices, in this order."""
        sizes = self.counts.sum(-1)
        ends = sizes.cumsum(0).tolist()
        starts = [end - size for end, size in zip(ends, sizes.tolist(), strict=True)]
        parts = [self.ids[starts[row] : ends[row]] for row in rows]
        index = torch.as_tensor(rows, dtype=torch.long)
        return TokenSupport(torch.cat(parts) if parts else self.ids[:0], self.counts[index])


@dataclass(frozen=True)
class TokenBatch:
    """Sampled tokens with what is needed to compute their log-probs again.

    Attributes:
        prompts: the prompt of each row.
        token_ids: sampled ids, zero where loss_mask is False.
        loss_mask: True for a token that was sampled by the policy and is trained; False is padding.
        temperature: logits were divided by it before the softmax, for every row.
        support: the ids that could be sampled under top-k, top-p or min-p; None without truncation.
        sizes: size of each row's image, which decides the places of its tokens; None: texts, or images of the size in
            the policy's settings.
    """

    stream: ClassVar[Stream] = "tokens"

    prompts: tuple[str, ...]
    token_ids: Int[Tensor, "batch time"]
    loss_mask: Bool[Tensor, "batch time"]
    temperature: float
    support: TokenSupport | None = None
    sizes: tuple[ImageSize, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.prompts) == self.token_ids.shape[0], "one prompt per row"
        assert self.sizes is None or len(self.sizes) == len(self.prompts), "one size per row"
        assert self.token_ids.shape == self.loss_mask.shape, "one mask entry per token"
        assert self.temperature > 0, "temperature is positive"

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> "TokenBatch":
        """Return the rows with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return TokenBatch(
            prompts=tuple(self.prompts[row] for row in rows),
            token_ids=self.token_ids[index],
            loss_mask=self.loss_mask[index],
            temperature=self.temperature,
            support=None if self.support is None else self.support.select(rows),
            sizes=None if self.sizes is None else tuple(self.sizes[row] for row in rows),
        )

    @classmethod
    def join(cls, batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """Return the rows of all batches, padded on the right to one length.

        Args:
            batches: at least one; of one temperature, all with or all without a support, and likewise with sizes.
        """
        kinds = {(batch.temperature, batch.support is None, batch.sizes is None) for batch in batches}
        assert len(kinds) == 1, "sampled alike"
        sizes = [size for batch in batches for size in batch.sizes or ()]
        supports = [batch.support for batch in batches if batch.support is not None]
        counts = pad_to_longest([support.counts for support in supports])
        return cls(
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            token_ids=pad_to_longest([batch.token_ids for batch in batches]),
            loss_mask=pad_to_longest([batch.loss_mask for batch in batches]),
            temperature=batches[0].temperature,
            support=TokenSupport(torch.cat([support.ids for support in supports]), counts) if supports else None,
            sizes=tuple(sizes) if sizes else None,
        )

    def trimmed(self) -> "TokenBatch":
        """Remove the trailing columns that are padding in every row; at least one column stays."""
        used = self.loss_mask.any(0).nonzero()
        time = max(1, int(used.max()) + 1 if len(used) else 1)
        support = self.support
        return replace(
            self,
            token_ids=self.token_ids[:, :time],
            loss_mask=self.loss_mask[:, :time],
            support=None if support is None else replace(support, counts=support.counts[:, :time]),
        )


@dataclass(frozen=True)
class DenoisingBatch:
    """Noisy denoising steps with what is needed to compute their log-probs again; an action is one step.

    Attributes:
        prompts: the prompt of each row.
        states: latents before the first noisy step and after each of them, one [steps + 1, *latent] per row, in the
            dtype and layout that the pipeline works in; equally many steps in all rows.
        first_steps: index of the first noisy step among the denoising steps, one per row.
        sizes: size of each row's image.
        drafts: the tokens that each row's image is made of; None: images are made of the prompts alone.
    """

    stream: ClassVar[Stream] = "denoising"

    prompts: tuple[str, ...]
    states: tuple[Tensor, ...]
    first_steps: tuple[int, ...]
    sizes: tuple[ImageSize, ...]
    drafts: TokenBatch | None = None

    def __post_init__(self) -> None:
        rows = len(self.prompts)
        assert len(self.states) == len(self.first_steps) == len(self.sizes) == rows, "one of each per row"
        assert self.drafts is None or len(self.drafts) == rows, "one draft per row"
        assert len({len(states) for states in self.states}) <= 1, "equally many steps"

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def loss_mask(self) -> Bool[Tensor, "batch steps"]:
        """True everywhere: only noisy steps are stored."""
        steps = len(self.states[0]) - 1 if self.states else 0
        return torch.ones(len(self), steps, dtype=torch.bool)

    def select(self, rows: Sequence[int]) -> "DenoisingBatch":
        """Return the rows with these indices, in this order."""
        return DenoisingBatch(
            prompts=tuple(self.prompts[row] for row in rows),
            states=tuple(self.states[row] for row in rows),
            first_steps=tuple(self.first_steps[row] for row in rows),
            sizes=tuple(self.sizes[row] for row in rows),
            drafts=None if self.drafts is None else self.drafts.select(rows),
        )

    @classmethod
    def join(cls, batches: Sequence["DenoisingBatch"]) -> "DenoisingBatch":
        """Return the rows of all batches.

        Args:
            batches: at least one; all with or all without drafts.
        """
        drafts = [batch.drafts for batch in batches if batch.drafts is not None]
        assert len(drafts) in (0, len(batches)), "sampled alike"
        return cls(
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            states=tuple(states for batch in batches for states in batch.states),
            first_steps=tuple(first for batch in batches for first in batch.first_steps),
            sizes=tuple(size for batch in batches for size in batch.sizes),
            drafts=TokenBatch.join(drafts) if drafts else None,
        )

    def trimmed(self) -> "DenoisingBatch":
        """Return the batch: it has no padding."""
        return self


Actions = TokenBatch | DenoisingBatch
"""The sampled actions of one stream, one row per sample, with what is needed to compute their log-probs again."""


@dataclass(frozen=True)
class SampledActions:
    """The actions of one stream as they were sampled.

    Attributes:
        actions: the tokens, or the denoising steps.
        rollout_logprobs: log-prob of each action under the distribution it was sampled from, nats, fp32; zero where the
            loss mask is False. Of a denoising step: the mean, or the sum, over the dimensions of the latents.
        finished: False for a row that was truncated at its maximum length.
        max_length: maximum number of actions of a row, by the settings of its sampler; of images, that of the size in
            the settings, whatever the sizes of the rows: the constant that some losses divide by.
    """

    actions: Actions
    rollout_logprobs: Float[Tensor, "batch time"]
    finished: Bool[Tensor, " batch"]
    max_length: int


@dataclass(frozen=True)
class SampledTokens(SampledActions):
    """Tokens as they were sampled.

    Attributes:
        prompt_lengths: number of ids that the model read before the first token of each row.
    """

    actions: TokenBatch
    prompt_lengths: Int[Tensor, " batch"]

    def select(self, rows: Sequence[int]) -> "SampledTokens":
        """Return the rows with these indices, in this order, without columns that are padding in all of them."""
        index = torch.as_tensor(rows, dtype=torch.long)
        tokens = self.actions.select(rows).trimmed()
        return SampledTokens(
            actions=tokens,
            rollout_logprobs=self.rollout_logprobs[index, : tokens.token_ids.shape[1]],
            finished=self.finished[index],
            max_length=self.max_length,
            prompt_lengths=self.prompt_lengths[index],
        )


@dataclass(frozen=True)
class StepGaussians:
    """The Gaussians that denoising steps are drawn from, and how far an update has moved them.

    Attributes:
        drift: KL(policy || policy before the update) in closed form, nats, fp32, reduced over the latents' values like
            the log-prob, with gradient; zero until the first optimizer step, or if the update does not ask for it.
        std: standard deviation of each value of the latents, fp32.
        dt: length of the step, the difference of its sigmas; positive, fp32.
    """

    drift: Float[Tensor, "batch steps"]
    std: Float[Tensor, "batch steps"]
    dt: Float[Tensor, "batch steps"]


@dataclass(frozen=True)
class ActionLogprobs:
    """Log-probs of given actions under a policy.

    Attributes:
        logprobs: nats, fp32; zero where the loss mask is False.
        entropy: entropy of the distribution each action was sampled from, nats, fp32; zero where masked, and everywhere
            if none was requested; None where no weight can change it, as of denoising steps.
        kl: KL(policy || reference) of these distributions in closed form, fp32; zero where masked, and everywhere if it
            was not requested.
        gaussians: of denoising steps; None for tokens.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, "batch time"]
    gaussians: StepGaussians | None = None


@dataclass(frozen=True)
class TrainingRows(SampledActions):
    """The stored actions of one stream joined with their advantages: the input of one update of its component.

    Attributes:
        sample_ids: stable name of each row.
        advantages: one per row; finite.
        on_policy: whether the weights before the update are those that sampled the row.
        old_logprobs: under the weights before the update; None until they are computed.
        old_entropy: of the same distributions, nats; None until they are computed, or if not needed.
        ref_logprobs: under the reference; None until they are computed, or without a reference.
    """

    sample_ids: tuple[str, ...]
    advantages: Float[Tensor, " batch"]
    on_policy: Bool[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch time"] | None = None
    old_entropy: Float[Tensor, "batch time"] | None = None
    ref_logprobs: Float[Tensor, "batch time"] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> "TrainingRows":
        """Return the rows with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: each[index] for name, each in values.items() if isinstance(each, Tensor)}
        sample_ids = tuple(self.sample_ids[row] for row in rows)
        return replace(self, sample_ids=sample_ids, actions=self.actions.select(rows), **tensors)


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
