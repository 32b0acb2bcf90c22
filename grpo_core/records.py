"""What passes between the stages, as frozen records of tensors with one row a sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Sampled tokens with what is needed to compute their log-probs again.

    Attributes:
        prompts: the prompt of each row.
        token_ids: sampled ids, zero where loss_mask is False.
        loss_mask: True for a token that was sampled by the policy and is trained; False is padding.
        temperature: logits were divided by it before the softmax, for every row.
    """

    prompts: tuple[str, ...]
    token_ids: Int[Tensor, "batch time"]
    loss_mask: Bool[Tensor, "batch time"]
    temperature: float

    def __post_init__(self) -> None:
        assert len(self.prompts) == self.token_ids.shape[0], "one prompt a row"
        assert self.token_ids.shape == self.loss_mask.shape, "one mask entry a token"
        assert self.temperature > 0, "temperature is positive"

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> "TokenBatch":
        """The rows with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return TokenBatch(
            prompts=tuple(self.prompts[row] for row in rows),
            token_ids=self.token_ids[index],
            loss_mask=self.loss_mask[index],
            temperature=self.temperature,
        )


@dataclass(frozen=True)
class SampledTokens:
    """A batch as the sampler leaves it.

    Attributes:
        tokens: the sampled ids.
        rollout_logprobs: log-prob of each sampled id under the distribution it was drawn from, nats, fp32;
            zero where the loss mask is False.
    """

    tokens: TokenBatch
    rollout_logprobs: Float[Tensor, "batch time"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probs of given tokens under a policy.

    Attributes:
        logprobs: nats, fp32; zero where the loss mask is False.
        entropy: entropy of the distribution each token was drawn from, nats, fp32; zero where masked.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]


@dataclass(frozen=True)
class TrainingRows:
    """Stored rollouts joined with their advantages: what one policy update learns from.

    Attributes:
        sample_ids: stable name of each row.
        tokens: prompts, ids, loss mask and temperature as stored.
        rollout_logprobs: as recorded while sampling.
        advantages: one a row; finite.
        old_logprobs: recomputed on the weights before the update; None until they are.
    """

    sample_ids: tuple[str, ...]
    tokens: TokenBatch
    rollout_logprobs: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch time"] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def with_old_logprobs(self, old_logprobs: Float[Tensor, "batch time"]) -> "TrainingRows":
        """The same rows, their old_logprobs known."""
        return replace(self, old_logprobs=old_logprobs)

    def select(self, rows: Sequence[int]) -> "TrainingRows":
        """The rows with these indices, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return TrainingRows(
            sample_ids=tuple(self.sample_ids[row] for row in rows),
            tokens=self.tokens.select(rows),
            rollout_logprobs=self.rollout_logprobs[index],
            advantages=self.advantages[index],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[index],
        )
