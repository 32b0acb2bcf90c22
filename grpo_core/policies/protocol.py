"""The interfaces of a policy, and the base of a kind of policy. Losses and updates use only these, for any model."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from grpo_core.errors import InputError
from grpo_core.pipeline_files import INDEX_FILE, Parts, refuse_missing_folder
from grpo_core.policies.trained.quantization import QuantizationSettings, refuse_unusable_weights
from grpo_core.rollouts.streams import Modality, Stream

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from grpo_core.policies.sizes import ModelSizes
    from grpo_core.policies.trained.model import TrainedModel
    from grpo_core.policies.trained.offload import ComponentOffload
    from grpo_core.policies.trained.settings import TrainingChoice
    from grpo_core.rollouts.actions import DenoisingBatch
    from grpo_core.rollouts.ragged import RaggedRows
    from grpo_core.rollouts.records import (
        ActionLogprobs,
        Entropies,
        GroupRequest,
        RolloutGroup,
        StepMeans,
        TrainingRows,
    )
    from grpo_core.rollouts.streams import ImageSize


class PolicyComponent(Protocol):
    """The part of a policy that makes the actions of one stream, and scores actions that were sampled before."""

    trained: "TrainedModel"

    def logprobs(
        self, actions: Any, *, entropy: "Entropies" = "constant", others: "StepMeans | None" = None
    ) -> "ActionLogprobs":
        """Compute the log-probs of actions of its stream under the current weights; gradients flow if enabled.

        The KL to the reference, and the drift, are in closed form from the means that are given, with gradients.
        """

    def compared(
        self, batches: "Iterable[TrainingRows]", *, kl: bool
    ) -> "Iterator[tuple[TrainingRows, StepMeans | None]]":
        """Yield each batch with what its actions are compared with; weights are exchanged once for many batches.

        With `kl` that is the reference; and the policy before the update, where it is kept. None for tokens.
        """

    def reference_logprobs(self, actions: Any) -> "Float[Tensor, 'batch time']":
        """Compute the log-probs of such actions under the frozen reference, without gradients."""

    def as_reference(self) -> AbstractContextManager["nn.Module"]:
        """Return a context for several calls of `reference_logprobs`, which exchange no weights inside it."""

    def microbatches(self, rows: "RaggedRows", indices: Sequence[int], size: int) -> list[list[int]]:
        """Cut rows of its stream into microbatches of at most `size`, each as places in `indices`."""

    def summed_values(self, actions: Any) -> int:
        """Return how many values a log-prob of such actions is a sum over, each of which rounds on its own."""

    def trainable_parameters(self) -> "dict[str, nn.Parameter]":
        """Return the parameters that an update changes, by name, in a fixed order."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context with the weights of the networks that score actions on their device."""

    def prepare_for_update(self, actions: Any = None) -> None:
        """Enter the mode for gradients: no dropout, recomputation if so configured; `actions` are all that follow."""

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling: no dropout, no recomputation."""

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed, as safetensors that peft, transformers or diffusers can load."""

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""


class VelocityComponent(PolicyComponent, Protocol):
    """A component that denoises, seen by an algorithm that adds noise to finished images again."""

    def velocities(self, actions: "DenoisingBatch") -> "Float[Tensor, 'batch ...']":
        """Return the derivative of each row's first state by sigma at its first step; the actions are of one size."""

    def sigmas(self, actions: "DenoisingBatch") -> "Float[Tensor, ' steps']":
        """Return the noise level before each denoising step of these rows, which are of one size."""


class Policy(Protocol):
    """A model, or several that work together, from prompts to images or texts."""

    offload: "ComponentOffload"

    @property
    def components(self) -> "Mapping[Stream, PolicyComponent]":
        """The trained components by the stream of their actions, in the order of STREAMS; their parameters differ."""

    @classmethod
    def load(
        cls,
        model: str,
        settings: Any,
        choices: Mapping[Stream, "TrainingChoice"],
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        autocast: "torch.dtype | None",
        attn_implementation: str | None = None,
        offload: bool = False,
    ) -> "Policy":
        """Load a model by folder or hub name.

        Args:
            choices: what of each trained component is trained, by stream; the other components are frozen.
            attn_implementation: of the trained model, as in transformers; None: transformers' default.
            offload: keep the frozen weights that are not in use off the device, if it has several networks.

        Raises:
            InputError: no such model, one that cannot run here, settings that it cannot sample with, adapter targets
                that match nothing, or no parameter to train.
        """

    def sample_with(self, settings: Any) -> None:
        """Use these settings, the family's frozen record, from this call on to sample, score and read prompts."""

    def sample(self, requests: "Sequence[GroupRequest]") -> "Iterator[RolloutGroup]":
        """Sample every group, in order; a sample depends on its prompt, size and seeds, not on the other rows.

        Requests have one image size and equally many sources and samples. NonFiniteError names samples.
        """

    def sample_batches(self, batches: "Sequence[Sequence[GroupRequest]]") -> "Iterator[RolloutGroup]":
        """Sample the groups of several batches, in order, as `sample` does for each.

        Where components are offloaded, each does its part for all batches before the next one comes to the device.
        """


class PolicyFamily(ABC):
    """One kind of policy; creating it does not import its models' libraries.

    Attributes:
        trained: the network whose weights make a stream's actions, by stream in the order of STREAMS; "" is the model.
        settings_class: of its sampling settings, a frozen dataclass.
        file: that the folder of each of its models has.
        reads_images: whether the columns image and images of a prompt file are images in prompts without being named.
    """

    modality: Modality
    trained: Mapping[Stream, str]
    settings_class: type[Any]
    file: str = INDEX_FILE
    reads_images: bool = False

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of its components that can be trained, in the order of STREAMS."""
        return tuple(self.trained)

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Return the frozen sampling settings of a section or a stored row, which may have others, tuples as lists."""
        known = {field.name: values[field.name] for field in fields(self.settings_class) if field.name in values}
        tuples = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
        return self.settings_class(**tuples)

    @abstractmethod
    def policy_class(self) -> type[Policy]:
        """Import the libraries of its models and return the class of its policies."""

    @abstractmethod
    def parts(self, model: str) -> Parts | None:
        """Return the networks of a model; None if its files are not on this machine and could name others."""

    @abstractmethod
    def build_on_meta(self, model: str, part: str) -> Any:
        """Build a network on the meta device, without memory or values; InputError without its configuration."""

    @abstractmethod
    def train(self, stream: Stream, network: Any, choice: "TrainingChoice", model: str) -> "TrainedModel":
        """Apply a choice to a network on the meta device; InputError if it matches nothing."""

    @abstractmethod
    def refuse_unusable(self, model: str, settings: Any) -> None:
        """Raise InputError if the model or these settings cannot be used; only local files are read."""

    def refuse_without_pull(self, model: str, settings: Any) -> None:
        """Raise InputError for a model whose velocities cannot be matched without a pull to the reference."""
        return

    def is_tried(self, model: str) -> bool:
        """Return whether this project's tests try models like this one; its configuration is on this machine."""
        return True

    @abstractmethod
    def refuse_prompts(
        self, model: str, settings: Any, prompts: Sequence[str], images: "Sequence[Sequence[ImageSize]]" = ()
    ) -> int | None:
        """Raise InputError, with `prompt N` from 1, if the model cannot read one of the prompts and its images' sizes.

        Only its tokenizer and processor are loaded. Returned are the ids of the longest, its images' included; None
        where a prompt's length decides no memory.
        """

    @abstractmethod
    def sizes(
        self,
        model: str,
        settings: Any,
        choices: Mapping[Stream, "TrainingChoice"],
        images: Sequence["ImageSize"],
        longest: int | None = None,
    ) -> "ModelSizes":
        """Return what decides the memory of the model, which is built on the meta device with what is trained of it.

        Args:
            images: sizes of the images; empty: that of the settings.
            longest: ids of the longest prompt, as `refuse_prompts` returned them; None: an assumed number.

        Raises:
            InputError: its configuration is not on this machine, or a choice matches nothing in the model.
        """

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model; imports no library of models."""
        refuse_missing_folder(model, self.file)

    def refuse_quantization(
        self,
        model: str,
        quantization: QuantizationSettings | None,
        streams: Iterable[Stream],
        device: "torch.device",
        *,
        adapters: bool,
    ) -> None:
        """Raise InputError if the weights cannot be quantized as chosen on this device, or are stored quantized.

        Under `adapters` alone, weights that bitsandbytes stored in 4 bits are used too. Only local configuration files
        are read.
        """
        if (parts := self.parts(model)) is not None:
            trained = [self.trained[stream] for stream in streams]
            refuse_unusable_weights(model, parts, quantization, device, trained=trained, adapters=adapters)

    def example_ids(
        self, model: str, settings: Any, output: "ImageSize | str", *, edited: bool, seed: int
    ) -> list[int] | None:
        """Return token ids as a sample has them, for a trial of what reads them; None without tokens or local files.

        The output is a text, or the size of an image, edited or not, whose ids come from the seed.
        """
        return None

    def load_network(self, model: str, stream: Stream, dtype: "torch.dtype") -> Any:
        """Load the network that makes a stream's actions alone, as it is stored, on the CPU."""
        from grpo_core.policies.pipeline_loading import load_network

        parts = self.parts(model)
        assert parts is not None, "the model has been loaded from these files"
        return load_network(model, parts, self.trained[stream], dtype)

    def save_whole(self, base: Path, weights: Mapping[Stream, Path], folder: Path, *, dtype: "torch.dtype") -> None:
        """Write the base with trained weights in place of its own, as diffusers or transformers load it.

        Args:
            weights: folder with what `save_weights` of each trained component wrote, by stream.
            folder: empty.
            dtype: of the base's weights during training; merged weights are saved in it.
        """
        from grpo_core.policies.trained.whole import TrainedPart, save_pipeline

        loads = {stream: partial(self.load_network, str(base), stream, dtype) for stream in weights}
        parts = {self.trained[stream]: TrainedPart(own, loads[stream]) for stream, own in weights.items()}
        save_pipeline(base, folder, parts)

    def check_choices(self, model: str, choices: Mapping[Stream, "TrainingChoice"]) -> tuple[str, ...]:
        """Return what a person should know about the choices; raise InputError if one matches nothing in the model."""
        for stream, choice in choices.items():
            self.train(stream, self.build_on_meta(model, self.trained[stream]), choice, model)
        return ()


P = TypeVar("P", bound=Hashable)


def first_numbers(prompts: Iterable[P]) -> dict[P, int]:
    """Number the prompts that are checked, from 1; of equal ones the first."""
    numbers: dict[P, int] = {}
    for number, prompt in enumerate(prompts, start=1):
        numbers.setdefault(prompt, number)
    return numbers


@contextmanager
def numbered_prompt(number: int) -> Iterator[None]:
    """Give errors of the place `prompt` the number of the prompt, as of :func:`first_numbers`."""
    try:
        yield
    except InputError as error:
        raise InputError(error.place.replace("prompt", f"prompt {number}", 1), error.value, error.hint) from error


def family_module(kind: str) -> str:
    """Return the dotted name of the module of a kind of policy."""
    return f"grpo_core.policies.{kind}.family"


def policy_family(kind: str) -> PolicyFamily:
    """Return the policy family of that name, which is the name of its package."""
    family: PolicyFamily = import_module(family_module(kind)).FAMILY
    return family
