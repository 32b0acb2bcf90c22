"""The settings that every reward with a CLIP has, and what can be said of them before anything loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from grpo_core.errors import InputError
from grpo_core.rewards.devices import check_device_setting, find_device_problem
from grpo_core.rewards.embedding.clip_architecture import (
    DEFAULT_RELEASE,
    WEIGHTS_FILE,
    ClipArchitecture,
    check_model_setting,
    find_architecture,
    is_config_file,
    published_weights,
)
from grpo_core.rewards.embedding.clip_model import ClipModel, load_clip
from grpo_core.rewards.weights import (
    PublishedWeights,
    WeightFile,
    check_digest_setting,
    check_source_setting,
    find_weights_problem,
    resolve_weights,
)

DEFAULT_MODEL = "ViT-L-14-quickgelu"
_OPENAI_L14 = "timm/vit_large_patch14_clip_224.openai"
OPENAI_WEIGHTS = PublishedWeights(
    WEIGHTS_FILE,
    "timm",
    f"https://huggingface.co/{_OPENAI_L14}",
    f"hf://{_OPENAI_L14}/{WEIGHTS_FILE}",
    digest="",
    note="OpenAI's, MIT licence",
)
"""The weights of the default model."""

_BESIDE_CONFIG = PublishedWeights(WEIGHTS_FILE, "its makers", "the place that its configuration came from", digest="")


@dataclass(frozen=True)
class ClipSettings:
    """Which CLIP a reward looks through; see the reward for the fields.

    Attributes:
        reward: the reward's name, for the places in messages.
    """

    reward: str
    model: str
    pretrained: str | None
    weights: str | None
    weights_sha256: str | None
    device: str

    def check(self) -> None:
        """Refuse settings of a wrong type or form.

        Raises:
            InputError: the first of them.
        """
        check_model_setting(self._place("model"), self.model)
        if self.pretrained is not None and not (isinstance(self.pretrained, str) and self.pretrained):
            hint = "Set open_clip's name of the release that the weights are, such as openai."
            raise InputError(self._place("pretrained"), self.pretrained, hint)
        check_source_setting(self._place("weights"), self.weights, OPENAI_WEIGHTS)
        check_digest_setting(self._place("weights_sha256"), self.weights_sha256)
        check_device_setting(self._place("device"), self.device)

    def problems(self) -> list[InputError]:
        """What stands in the way of loading the model."""
        try:
            architecture = self.architecture()
        except InputError as error:
            return [error]
        problems = (
            find_weights_problem(
                self._place("weights"), self.weights, self.weights_sha256, self._published(architecture)
            ),
            find_device_problem(self._place("device"), self.device),
        )
        return [problem for problem in problems if problem is not None]

    def architecture(self) -> ClipArchitecture:
        """The network.

        Raises:
            InputError: there is none of that name, or the weights were trained for another.
        """
        return find_architecture(self._place("model"), self.model, self.pretrained)

    def weight_file(self) -> WeightFile:
        """The weights.

        Raises:
            InputError: they are missing or not the right ones.
        """
        published = self._published(self.architecture())
        return resolve_weights(self._place("weights"), self.weights, self.weights_sha256, published)

    def load(self) -> ClipModel:
        """The model; the first call of a process loads it.

        Raises:
            InputError: as :meth:`architecture` and :meth:`weight_file`; the file holds another network.
        """
        return load_clip(self._place("weights"), self.architecture(), self.weight_file(), self.device)

    def settings(self) -> Mapping[str, object]:
        """Network and release; a configuration file by its content.

        Raises:
            InputError: as :meth:`architecture`.
        """
        if not is_config_file(self.model):
            # Without open_clip, whose import takes longer than all else that a configuration needs.
            return {"model": self.model, "pretrained": self.pretrained or DEFAULT_RELEASE}
        return {"model": self.architecture().name, "pretrained": None}

    def _place(self, setting: str) -> str:
        return f"rewards.{self.reward}.{setting}"

    def _published(self, architecture: ClipArchitecture) -> PublishedWeights:
        if is_config_file(self.model):
            return _BESIDE_CONFIG
        if (self.model, architecture.release) == (DEFAULT_MODEL, DEFAULT_RELEASE):
            return OPENAI_WEIGHTS
        return published_weights(self.model, architecture.release)


def library_version() -> str:
    """open_clip's release, which prepares the images and cuts up the texts."""
    return f"open-clip-{metadata.version('open-clip-torch')}"
