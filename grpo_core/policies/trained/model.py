"""The interface of a trained model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from grpo_core.policies.trained.recompute import enable_recomputation, recompute_layers
from grpo_core.policies.trained.reference import copied, exchanged, mix_into


class TrainedModel(ABC):
    """A model with its trained part, and the reference that its KL is measured against.

    Attributes:
        model: the module that is run.
    """

    model: nn.Module
    # The reference's values of the trained parameters; None if it needs none.
    _reference: dict[str, Tensor] | None

    def __init__(self, model: nn.Module, *, gradient_checkpointing: bool) -> None:
        """Wrap a model whose parameters are already frozen or trainable.

        Raises:
            InputError: activations are to be recomputed, but the model has no layers that can.
        """
        self.model = model
        self._gradient_checkpointing = gradient_checkpointing
        self._reference = None
        if gradient_checkpointing:
            enable_recomputation(model)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name, in a fixed order; tied weights once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients; dropout stays off, or the ratio would differ from one on unchanged weights."""
        self.model.eval()
        recompute_layers(self.model, self._gradient_checkpointing)

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling, without dropout and recomputation."""
        self.model.eval()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained part."""

    @abstractmethod
    def load(self, folder: Path | None) -> None:
        """Load the trained part from `folder`; None restores the initial one.

        Raises:
            InputError: the weights are another model's; none of them is loaded.
        """

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that gives the reference model, for forward passes without gradients.

        Inside it the policy's weights may be swapped out.

        Raises:
            ValueError: there is none.
        """

    @abstractmethod
    def _reference_device(self) -> torch.device | None:
        """Return the device of the reference's values; None: the device of each parameter."""

    @contextmanager
    def _as_reference(self, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        with torch.no_grad(), exchanged(self.trainable_parameters(), values):
            yield self.model

    def _require_reference(self) -> None:
        if not self.has_reference:
            raise ValueError("no reference is kept; train_model keeps one with reference='device' or 'cpu'")

    def _stored_reference(self, folder: Path | None) -> dict[str, Tensor]:
        values = copied(self.trainable_parameters(), self._reference_device())
        with self._as_reference(values):
            self.load(folder)
        return values

    def _reference_values(self) -> dict[str, Tensor]:
        self._require_reference()
        return self._stored_reference(None) if self._reference is None else self._reference

    def change_reference(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Keep the reference's values in another form, such as a process's share of them.

        Args:
            change: takes a parameter's name and the reference's value of it, returns the value to keep instead.
        """
        if self._reference is not None:
            self._reference = {name: change(name, value) for name, value in self._reference.items()}

    def refresh_reference(self, mix: float) -> None:
        """Make the reference mix * policy + (1 - mix) * reference, parameter by parameter, in fp32.

        With adapters the matrices are mixed, not their products that are added to the weights; the initial reference of
        adapters has their initial matrices, which add nothing.

        Args:
            mix: share of the policy, 0 < mix <= 1; 1 makes the reference the policy.

        Raises:
            ValueError: there is no reference, or mix is outside its range.
        """
        values = self._reference_values()
        mix_into(values, self.trainable_parameters(), mix)
        self._reference = values

    def save_reference(self, folder: Path) -> None:
        """Write the reference as `save` writes the policy.

        Raises:
            ValueError: there is no reference.
        """
        with self._as_reference(self._reference_values()):
            self.save(folder)

    def load_reference(self, folder: Path | None) -> None:
        """Load the reference of `folder`; None restores the initial one.

        Raises:
            ValueError: there is no reference to be replaced.
            InputError: the weights are another model's; the reference stays as it was.
        """
        self._require_reference()
        self._reference = self._stored_reference(folder)
