"""The half of the Policy protocol that the trained model implements."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.policies.trained.model import TrainedModel
from grpo_core.records import TokenBatch, TokenLogprobs


class TrainedPolicy(ABC):
    """The half of the Policy protocol that does not depend on what is sampled.

    Attributes:
        trained: the trained parameters and the reference.
    """

    trained: TrainedModel

    @abstractmethod
    def _score(self, model: nn.Module, tokens: TokenBatch, *, entropy: bool) -> TokenLogprobs:
        """Compute the log-probs of the tokens under this model, the policy's or the reference."""

    def logprobs(self, tokens: TokenBatch, *, entropy: bool = True) -> TokenLogprobs:
        """Compute the log-probs of the tokens under the current weights."""
        return self._score(self.trained.model, tokens, entropy=entropy)

    def reference_logprobs(self, tokens: TokenBatch) -> Float[Tensor, "batch time"]:
        """Compute the log-probs of the tokens under the reference, without gradients."""
        with torch.no_grad(), self.trained.reference() as reference:
            return self._score(reference, tokens, entropy=False).logprobs

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name."""
        return self.trained.trainable_parameters()

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients."""
        self.trained.prepare_for_update()

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling."""
        self.trained.prepare_for_sampling()

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed."""
        self.trained.save(folder)

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""
        self.trained.load(folder)

    def refresh_reference(self, mix: float) -> None:
        """Make the reference mix * policy + (1 - mix) * reference."""
        self.trained.refresh_reference(mix)

    def save_reference(self, folder: Path) -> None:
        """Write the reference as `save_weights` writes the policy."""
        self.trained.save_reference(folder)

    def load_reference(self, folder: Path | None) -> None:
        """Load the reference of `folder`; None restores the initial one."""
        self.trained.load_reference(folder)
