"""What the stages ask of a policy. Losses and updates see this and never which model serves it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from grpo_core.records import SampledTokens, TokenBatch, TokenLogprobs


class Policy(Protocol):
    """A model that samples tokens for prompts and scores tokens that were sampled before."""

    def sample(self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int]) -> SampledTokens:
        """Draw `group_size` token sequences for each prompt, siblings side by side.

        Args:
            prompts: one a group; each is run through the model once and its cache shared by its siblings.
            group_size: siblings of a prompt.
            seeds: len(prompts) * group_size seeds, one a sample: a sample depends on its prompt and its seed,
                not on the rows beside it.
        """

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image]:
        """The finished picture of each row; rows with one prompt and one noise seed share their noise."""

    def logprobs(self, tokens: TokenBatch) -> TokenLogprobs:
        """Log-probs and entropies of the given tokens under the current weights; gradients flow if enabled."""

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
