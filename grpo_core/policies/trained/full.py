"""Training of every weight outside the frozen parts."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.trained.choice import Reference
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.reference import copied
from grpo_core.policies.trained.weights import differing_shapes, on_cpu

WEIGHTS_FILE = "model.safetensors"


class FullModel(TrainedModel):
    """Every weight outside the frozen parts is trained.

    The reference differs only in the values of the trained weights. They are kept on the model's device or in CPU
    memory, and are swapped with the policy's while the reference is used.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        own_frozen: tuple[str, ...] = (),
        frozen: str | None = None,
        reference: Reference = "none",
        initial_state: Callable[[], dict[str, Tensor]] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Unfreeze the model outside the frozen parts.

        Args:
            model: changed in place.
            own_frozen: prefixes of the names of parameters that this kind of policy never trains.
            frozen: regular expression over the full names of further frozen parameters.
            reference: where its values are kept; `none`: no reference.
            initial_state: reads the initial weights again; None keeps a copy of them in CPU memory.
            gradient_checkpointing: recompute activations in the backward pass.

        Raises:
            InputError: `frozen` matches no parameter, or leaves none to train.
        """
        left_alone = _matching(model, frozen) if frozen is not None else set()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name.startswith(own_frozen) or name in left_alone))
        super().__init__(model, gradient_checkpointing=gradient_checkpointing)
        if not self.trainable_parameters():
            raise InputError("policy.frozen", frozen, "It leaves nothing to train; narrow it.")
        self._initial_state: Callable[[], dict[str, Tensor]] = initial_state or _kept(model)
        self._placement = reference
        if reference != "none":
            self._reference = copied(self.trainable_parameters(), self._reference_device())

    def save(self, folder: Path) -> None:
        """Write model.safetensors (or its shards) and config.json."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    def load(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""
        if folder is None:
            state = self._initial_state()
        else:
            state = {}
            for shard in sorted(folder.glob("model*.safetensors")):
                state.update(load_file(shard))
        # Of tied weights only one is stored.
        tied = (getattr(self.model, "all_tied_weights_keys", None) or {}).keys() - state.keys()
        differing = [name for name in differing_shapes(state, self.model.state_dict()) if name not in tied]
        if differing:
            raise InputError("policy", differing[:3], "The stored weights are for another model.")
        self.model.load_state_dict(state, strict=False)

    @property
    def has_reference(self) -> bool:
        """Whether the reference's values are kept."""
        return self._placement != "none"

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Give the model with the reference's weights swapped in."""
        self._require_reference()
        assert self._reference is not None
        with self._as_reference(self._reference) as model:
            yield model

    def _reference_device(self) -> torch.device | None:
        return torch.device("cpu") if self._placement == "cpu" else None


def _kept(model: nn.Module) -> Callable[[], dict[str, Tensor]]:
    start = {name: on_cpu(value) for name, value in model.state_dict().items()}
    return lambda: start


def _matching(model: nn.Module, pattern: str) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    matching = {name for name in names if re.fullmatch(pattern, name)}
    if not matching:
        some = ", ".join(names[:: max(1, len(names) // 4)][:4])
        hint = f"It has to match a parameter's full name; parameters are called {some}."
        raise InputError("policy.frozen", pattern, hint)
    return matching
