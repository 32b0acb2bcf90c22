"""The interfaces of a policy and of a kind of policy. Losses and updates use only these, for any model."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpo_core.image_size import ImageSize
from grpo_core.modality import Modality

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from grpo_core.policies.trained import TrainedModel, TrainingChoice
    from grpo_core.records import Entropies, Output, SampledTokens, TokenBatch, TokenLogprobs


class Policy(Protocol):
    """A model that samples tokens for prompts and scores tokens that were sampled before.

    Attributes:
        trained: the model and its trained parameters; processes that share an update shard it.
    """

    trained: "TrainedModel"

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row with the current settings; of images, of one of the settings' size."""

    def sample_with(self, settings: Any) -> None:
        """Use these settings, the family's frozen record, from this call on to sample, render and read prompts."""

    def sample(
        self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int], size: ImageSize | None = None
    ) -> "SampledTokens":
        """Sample `group_size` token sequences for each prompt, siblings next to each other.

        Args:
            group_size: siblings of a prompt.
            seeds: len(prompts) * group_size seeds, one per sample: a sample depends on its prompt and its seed,
                not on the other rows.
            size: of the images; None: that of the settings. Texts have none.
        """

    def render(self, tokens: "TokenBatch", *, noise_seeds: Sequence[int]) -> "Sequence[Output]":
        """Return the image or text of each row; rows with one prompt and one noise seed share their noise."""

    def logprobs(self, tokens: "TokenBatch", *, entropy: "Entropies" = "constant") -> "TokenLogprobs":
        """Compute the log-probs of the given tokens under the current weights; gradients flow if enabled.

        Args:
            entropy: whether entropies are computed too, and whether gradients flow through them.
        """

    def reference_logprobs(self, tokens: "TokenBatch") -> "Float[Tensor, 'batch time']":
        """Compute the log-probs of the given tokens under the frozen reference, without gradients."""

    def trainable_parameters(self) -> "dict[str, nn.Parameter]":
        """Return the parameters that an update changes, by name, in a fixed order."""

    def prepare_for_update(self) -> None:
        """Enter the mode for gradients: dropout stays off, activations are recomputed if so configured."""

    def prepare_for_sampling(self) -> None:
        """Enter the mode for sampling: no dropout, no recomputation."""

    def save_weights(self, folder: Path) -> None:
        """Write what an update changed, as safetensors that peft or transformers can load."""

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights of `folder`; None restores the initial ones."""


class PolicyFamily(Protocol):
    """One kind of policy; creating it does not import its models' libraries.

    Attributes:
        modality: what its tokens are rendered to.
    """

    modality: Modality

    def settings(self, values: Mapping[str, Any]) -> Any:
        """Return the frozen sampling settings from a configuration section or a stored row."""

    def load(
        self,
        model: str,
        settings: Any,
        choice: "TrainingChoice",
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        autocast: "torch.dtype | None",
        attn_implementation: str | None = None,
    ) -> Policy:
        """Load a model by folder or hub name.

        Args:
            attn_implementation: of the trained model, as in transformers; None: transformers' default.

        Raises:
            InputError: no such model, settings that it cannot sample with, or no parameter to train.
        """

    def refuse_missing(self, model: str) -> None:
        """Raise InputError if a given folder is missing or contains no model; imports no library of models."""

    def refuse_unusable(self, model: str, settings: Any) -> None:
        """Raise InputError if the model or these settings cannot be used, as far as its local files show."""

    def refuse_prompts(self, model: str, settings: Any, prompts: Sequence[str]) -> None:
        """Raise InputError if the model cannot read one of the prompts; only its tokenizer is loaded."""

    def save_whole(self, base: Path, weights: Path, folder: Path, *, dtype: "torch.dtype") -> None:
        """Write the base with trained weights in place of its own, as diffusers or transformers load it.

        Args:
            base: folder of the model that was trained.
            weights: folder with what `save_weights` of a policy wrote.
            folder: empty.
            dtype: of the base's weights during training; merged weights are saved in it.
        """

    def check_choice(self, model: str, choice: "TrainingChoice") -> tuple[str, ...]:
        """Return what a person should know about the choice; the model is built on the meta device.

        Raises:
            InputError: the choice matches nothing in the model.
        """


def family_module(kind: str) -> str:
    """Return the dotted name of the module of a kind of policy."""
    return f"grpo_core.policies.{kind}.family"


def policy_family(kind: str) -> PolicyFamily:
    """Return the policy family of that name, which is the name of its package."""
    family: PolicyFamily = import_module(family_module(kind)).FAMILY
    return family
