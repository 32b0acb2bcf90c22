"""What the stages ask of a policy. Losses and updates see this and never which model serves it."""

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
        trained: the model with what an update changes of it; processes that share an update cut it into shares.
    """

    trained: TrainedModel

    @property
    def max_length(self) -> int:
        """Tokens that a row can have, at most, with the present settings."""

    def sample_with(self, settings: Any) -> None:
        """Sample, render and read prompts with these settings from now on; a frozen record of the policy's own kind."""

    def sample(self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int]) -> SampledTokens:
        """Draw `group_size` token sequences for each prompt, siblings side by side.

        Args:
            prompts: one a group; each is run through the model once and its cache shared by its siblings.
            group_size: siblings of a prompt.
            seeds: len(prompts) * group_size seeds, one a sample: a sample depends on its prompt and its seed,
                not on the rows beside it.
        """

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> Sequence[Output]:
        """The finished image or text of each row; rows with one prompt and one noise seed share their noise."""

    def logprobs(self, tokens: TokenBatch, *, entropy: bool = True) -> TokenLogprobs:
        """Log-probs of the given tokens under the current weights; gradients flow if enabled.

        Args:
            tokens: with the temperature and the support that they were sampled with.
            entropy: compute the entropies too, gradients included; else they are zero.
        """

    def reference_logprobs(self, tokens: TokenBatch) -> Float[Tensor, "batch time"]:
        """Log-probs of the given tokens under the frozen reference; without gradients."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that an update changes, by name, in a fixed order."""

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients: dropout stays off, activations are recomputed if so configured."""

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling: no dropout, no recomputation."""

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed, as safetensors that peft or transformers load as they are."""

    def load_weights(self, folder: Path | None) -> None:
        """Take the weights of `folder`; None restores those the policy was built with."""

    def refresh_reference(self, mix: float) -> None:
        """Make the reference mix * policy + (1 - mix) * reference, weight by weight."""

    def save_reference(self, folder: Path) -> None:
        """Write a reference that is no longer the one the policy was built with."""

    def load_reference(self, folder: Path | None) -> None:
        """Take the reference of `folder`; None restores the one the policy was built with."""
