"""What every policy leaves to its trained model."""

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
        trained: what an update changes, and the reference.
    """

    trained: TrainedModel

    @abstractmethod
    def _score(self, model: nn.Module, tokens: TokenBatch, *, entropy: bool) -> TokenLogprobs:
        """Log-probs of the tokens under this model, which is the policy's own or the reference."""

    def logprobs(self, tokens: TokenBatch, *, entropy: bool = True) -> TokenLogprobs:
        """See Policy.logprobs."""
        return self._score(self.trained.model, tokens, entropy=entropy)

    def reference_logprobs(self, tokens: TokenBatch) -> Float[Tensor, "batch time"]:
        """See Policy.reference_logprobs."""
        with torch.no_grad(), self.trained.reference() as reference:
            return self._score(reference, tokens, entropy=False).logprobs

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """See Policy.trainable_parameters."""
        return self.trained.trainable_parameters()

    def prepare_for_update(self) -> None:
        """See Policy.prepare_for_update."""
        self.trained.prepare_for_update()

    def prepare_for_sampling(self) -> None:
        """See Policy.prepare_for_sampling."""
        self.trained.prepare_for_sampling()

    def save_weights(self, folder: Path) -> None:
        """See Policy.save_weights."""
        self.trained.save(folder)

    def load_weights(self, folder: Path | None) -> None:
        """See Policy.load_weights."""
        self.trained.load(folder)

    def refresh_reference(self, mix: float) -> None:
        """See Policy.refresh_reference."""
        self.trained.refresh_reference(mix)

    def save_reference(self, folder: Path) -> None:
        """See Policy.save_reference."""
        self.trained.save_reference(folder)

    def load_reference(self, folder: Path | None) -> None:
        """See Policy.load_reference."""
        self.trained.load_reference(folder)
