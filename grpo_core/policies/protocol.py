"""The interface of a policy. Losses and updates use only this, for any model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.policies.trained import TrainedModel
from grpo_core.records import Output, SampledTokens, TokenBatch, TokenLogprobs


class Policy(Protocol):
    """A model that samples tokens for prompts and scores tokens that were sampled before.

    Attributes:
        trained: the model and its trained parameters; processes that share an update shard it.
    """

    trained: TrainedModel

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row with the current settings."""

    def sample_with(self, settings: Any) -> None:
        """Use these settings, the family's frozen record, from this call on to sample, render and read prompts."""

    def sample(self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int]) -> SampledTokens:
        """Sample `group_size` token sequences for each prompt, siblings next to each other.

        Args:
            prompts: one per group; each runs through the model once, and its siblings share the cache.
            group_size: siblings of a prompt.
            seeds: len(prompts) * group_size seeds, one per sample: a sample depends on its prompt and its seed,
                not on the other rows.
        """

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> Sequence[Output]:
        """Return the image or text of each row; rows with one prompt and one noise seed share their noise."""

    def logprobs(self, tokens: TokenBatch, *, entropy: bool = True) -> TokenLogprobs:
        """Compute the log-probs of the given tokens under the current weights; gradients flow if enabled.

        Args:
            tokens: with the temperature and the support that they were sampled with.
            entropy: compute the entropies too, with gradients; otherwise they are zero.
        """

    def reference_logprobs(self, tokens: TokenBatch) -> Float[Tensor, "batch time"]:
        """Compute the log-probs of the given tokens under the frozen reference, without gradients."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name, in a fixed order."""

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients: dropout stays off, activations are recomputed if so configured."""

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling: no dropout, no recomputation."""

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed, as safetensors that peft or transformers can load."""

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""

    def refresh_reference(self, mix: float) -> None:
        """Make the reference mix * policy + (1 - mix) * reference, weight by weight."""

    def save_reference(self, folder: Path) -> None:
        """Write a reference that differs from the initial one."""

    def load_reference(self, folder: Path | None) -> None:
        """Load the reference of `folder`; None restores the initial one."""
