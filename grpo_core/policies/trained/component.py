"""The half of a policy's component that its trained model implements; adapters merged while sampling."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.microbatches import by_length
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.offload import NO_OFFLOAD, ComponentOffload
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import ActionLogprobs, Entropies, StepMeans, TrainingRows


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Put LoRA layers merged into copies of their weights in place of the wrappers; the weights come back to the bit.

    Only weights in fp32 or fp64 in CPU memory: in 16 bits the sum loses most of a small adapter, and on a GPU the
    copies would take memory that the cache needs.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    originals: list[tuple[nn.Module, str, Any, dict[nn.Parameter, torch.Tensor]]] = []
    try:
        for parent, name, layer in _lora_layers(model):
            base = layer.get_base_layer()
            parameters = list(base.parameters())
            # A tied weight is also read where there is no adapter.
            if all(_can_be_copied(each) and uses[id(each)] == 1 for each in parameters):
                originals.append((parent, name, layer, {each: each.data for each in parameters}))
                for each in parameters:
                    each.data = each.data.clone()
                with torch.no_grad():
                    layer.merge()
                setattr(parent, name, base)
        yield
    finally:
        for parent, name, layer, values in originals:
            setattr(parent, name, layer)
            layer.merged_adapters.clear()
            for parameter, value in values.items():
                parameter.data = value


def _lora_layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the layers with adapters, each with the module that it is a part of and its name there."""
    # Importing peft takes seconds, and most of what imports this package builds no adapters.
    from peft.tuners.lora import Linear

    # A variant, such as DoRA, keeps values of its own when it is merged.
    return [
        (parent, name, each)
        for parent in model.modules()
        for name, each in parent.named_children()
        if type(each) is Linear and not each.lora_variant
    ]


def _can_be_copied(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64)


A = TypeVar("A")


class TrainedComponent(ABC, Generic[A]):
    """The half of a PolicyComponent that does not depend on what is sampled; A is the type of its actions.

    `autocast` is the dtype of matrix products, None that of the weights; `parts` are the networks that score actions.
    """

    trained: TrainedModel
    autocast: torch.dtype | None
    offload: ComponentOffload = NO_OFFLOAD
    parts: tuple[str, ...] = ()
    _is_reference = False

    @abstractmethod
    def _score(
        self, model: nn.Module, actions: A, *, entropy: Entropies, others: StepMeans | None = None
    ) -> ActionLogprobs:
        """Compute the log-probs of the actions under this model, the policy's or the reference."""

    def _parts_of(self, actions: A) -> tuple[str, ...]:
        return self.parts

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context with the weights of the networks that score actions on their device."""
        return self.offload.using(*self.parts)

    @property
    def _device(self) -> torch.device:
        return next(self.trained.model.parameters()).device

    def logprobs(
        self, actions: A, *, entropy: Entropies = "constant", others: StepMeans | None = None
    ) -> ActionLogprobs:
        """Compute the log-probs of the actions under the current weights."""
        with self.offload.using(*self._parts_of(actions)):
            return self._score(self.trained.model, actions, entropy=entropy, others=others)

    def compared(self, batches: Iterable[TrainingRows], *, kl: bool) -> Iterator[tuple[TrainingRows, StepMeans | None]]:
        """Yield each batch with what its actions are compared with beside their log-probs: nothing."""
        assert not kl, "the KL over ids is estimated from log-probs"
        return ((batch, None) for batch in batches)

    def reference_logprobs(self, actions: A) -> Float[Tensor, "batch time"]:
        """Compute the log-probs of the actions under the reference, without gradients."""
        with torch.no_grad(), self.offload.using(*self._parts_of(actions)), self.as_reference() as reference:
            return self._score(reference, actions, entropy="none").logprobs

    @contextmanager
    def as_reference(self) -> Iterator[nn.Module]:
        """Have the reference's weights in place of the policy's inside; where they are there already, they stay."""
        if self._is_reference:
            yield self.trained.model
            return
        with self.trained.reference() as reference:
            self._is_reference = True
            try:
                yield reference
            finally:
                self._is_reference = False

    def microbatches(self, rows: RaggedRows, indices: Sequence[int], size: int) -> list[list[int]]:
        """Cut rows into microbatches of similar length, as places in `indices`."""
        return by_length(rows.lengths(indices), size)

    def summed_values(self, actions: A) -> int:
        """Return how many values a log-prob of these actions is a sum over, each of which rounds on its own."""
        return 1

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an update changes, by name."""
        return self.trained.trainable_parameters()

    def prepare_for_update(self, actions: A | None = None) -> None:
        """Enter the mode for gradients."""
        self.trained.prepare_for_update()

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling."""
        self.trained.prepare_for_sampling()

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        # A layer that is being checkpointed drops its cache.
        self.prepare_for_sampling()
        # Weights that are rounded to 16 bits for each product lose most of what is added to them.
        with self.trained.merged() if self.autocast is None else nullcontext(), self._precision():
            yield

    def _precision(self) -> torch.autocast:
        """Return a context that computes matrix products in `autocast`; sampling and scoring have to use the same."""
        return torch.autocast(self._device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed."""
        self.trained.save(folder)

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""
        self.trained.load(folder)


def refuse_unscaled_float16(dtype: torch.dtype, autocast_dtype: torch.dtype | None) -> None:
    """Raise InputError for training in float16: its smallest gradients are zero, and no update scales the loss."""
    hint = "Small gradients vanish in float16 without a scaled loss; use bfloat16 or float32."
    for place, found in (("policy.dtype", dtype), ("policy.autocast", autocast_dtype)):
        if found == torch.float16:
            raise InputError(place, "float16", hint)


def refuse_unavailable_attention(name: str | None) -> None:
    """Raise InputError for an implementation of attention whose package is missing."""
    if name == "flash_attention_2" and find_spec("flash_attn") is None:
        hint = "The package flash-attn is not installed; install it on a machine with a GPU, or use sdpa."
        raise InputError(_ATTENTION, name, hint)


def use_attention(network: Any, name: str | None) -> None:
    """Let a network compute attention with this implementation of transformers; None leaves the default.

    InputError if its package is missing, or the network does not support it.
    """
    refuse_unavailable_attention(name)
    if name is None:
        return
    of_diffusers = hasattr(network, "set_attention_backend")
    if of_diffusers and name not in _BACKENDS:
        hint = f"Models of diffusers do not have it; use one of {', '.join(_BACKENDS)}, or leave it out."
        raise InputError(_ATTENTION, name, hint)
    try:
        if of_diffusers:
            network.set_attention_backend(_BACKENDS[name])
        else:
            network.set_attn_implementation(name)
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError(_ATTENTION, name, f"The model does not support it here ({error}).") from error
    if not of_diffusers and network.config._attn_implementation != name:
        raise InputError(_ATTENTION, name, "The model does not let it be chosen; leave it out.")


_ATTENTION = "policy.attn_implementation"
_BACKENDS = {"sdpa": "native", "flash_attention_2": "flash", "flex_attention": "flex"}
"""Implementations of attention -> the backends of diffusers."""
