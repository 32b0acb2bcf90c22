"""Which CLIP the settings of a reward mean: open_clip's tag or configuration file, and the release of its weights.

A weight file records neither the activation that it was trained with nor how images were prepared for it. open_clip
knows both for the releases that it lists, and forgets them where weights come from a path, so they are looked up here.
"""

import difflib
import functools
import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass as settings_dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.model_reward import ModelReward, Sha256
from grpo_core.rewards.reward import STRICT, Text, problems_of
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rewards.weights import Published, Weights
from grpo_core.uses import Uses

DEFAULT_MODEL = "ViT-L-14-quickgelu"
DEFAULT_RELEASE = "openai"
WEIGHTS_FILE = "open_clip_model.safetensors"

LongPrompts = Literal["cut", "refuse"]
"""What a reward does with a prompt of which its model would read only the beginning."""

_LOGGER = logging.getLogger(__name__)
_OPENAI_L14 = "timm/vit_large_patch14_clip_224.openai"
_OPENAI_WEIGHTS = Published(
    "timm",
    WEIGHTS_FILE,
    f"https://huggingface.co/{_OPENAI_L14}",
    f"hf://{_OPENAI_L14}/{WEIGHTS_FILE}",
    note="OpenAI's, MIT licence",
)
_BESIDE_CONFIG = Published("its authors", WEIGHTS_FILE, "the source of its configuration")

_OTHER_TOWERS = (
    ("vision_cfg", "timm_model_name"),
    ("text_cfg", "hf_model_name"),
    ("text_cfg", "hf_tokenizer_name"),
)


@dataclass(frozen=True)
class ClipArchitecture:
    """A network that open_clip can build from its weights alone.

    Attributes:
        name: open_clip's tag, or ``config-`` with the first digits of the configuration's sha256.
        release: open_clip's tag of the weights; None for a configuration file.
        network: arguments of open_clip's CLIP class.
        preparation: what to change in open_clip's default preparation of images (mean, std, ...).
    """

    name: str
    release: str | None
    network: Mapping[str, Any] = field(hash=False)
    preparation: Mapping[str, Any] = field(hash=False)

    @property
    def width(self) -> int:
        """Length of an embedding."""
        return int(self.network["embed_dim"])

    @property
    def context_length(self) -> int:
        """Maximum tokens of a text, including the start and end marks."""
        return int(self.network["text_cfg"].get("context_length", 77))


@settings_dataclass(frozen=True, config=STRICT)
class ClipReward(ModelReward):
    """A reward that looks at CLIP's embeddings.

    Attributes:
        model: open_clip's tag of the network, or the path of an open_clip_config.json.
        pretrained: open_clip's name of the release of the weights; None: ``openai`` with a tag. It determines how
            images are prepared, and must have been trained with the network's activation.
        weights: open_clip's state dict: its path (.safetensors, or .pt of named tensors), or ``hf://owner/repo/file``.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
    """

    model: Annotated[Text, Uses.PLACE] = DEFAULT_MODEL
    pretrained: Annotated[Text | None, Uses.NOTHING] = None
    weights: Annotated[str | None, Uses.PLACE] = None
    weights_sha256: Sha256 | None = None

    @property
    def version(self) -> str:
        """Includes the library that prepares images and tokenizes texts."""
        return f"1+open-clip-{metadata.version('open-clip-torch')}"

    def __post_init__(self) -> None:
        if not is_config_file(self.model):
            _require_tag(self._place("model"), self.model)
        # For its checks: to know where others are published takes open_clip's import.
        self._weights(_OPENAI_WEIGHTS)

    def settings(self) -> Mapping[str, object]:
        """Return what determines the scores; a network by its content."""
        return {**super().settings(), **self.network_settings()}

    def network_settings(self) -> Mapping[str, object]:
        """Return network and release; a configuration file by its content. Raises as :meth:`architecture`."""
        if not is_config_file(self.model):
            # Without open_clip, whose import takes longer than everything else that a configuration needs.
            return {"model": self.model, "pretrained": self.pretrained or DEFAULT_RELEASE}
        return {"model": self.architecture().name, "pretrained": None}

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return CLIP's."""
        return {"clip": self.clip_weights()}

    def preflight(self) -> Sequence[str]:
        """List an unknown network, missing or wrong weights, a missing device."""
        return [*problems_of(self.architecture), *super().preflight()]

    def architecture(self) -> ClipArchitecture:
        """Return the network; raises as :func:`find_architecture`."""
        return find_architecture(self._place("model"), self.model, self.pretrained)

    def clip_weights(self) -> Weights:
        """Return where CLIP's weights are."""
        release = self.pretrained or DEFAULT_RELEASE
        if is_config_file(self.model):
            return self._weights(_BESIDE_CONFIG)
        if (self.model, release) == (DEFAULT_MODEL, DEFAULT_RELEASE):
            return self._weights(_OPENAI_WEIGHTS)
        import open_clip

        # owner/repo/file, where the file is empty if it has the usual name.
        repo, _, named = str(open_clip.get_pretrained_cfg(self.model, release)["hf_hub"]).rpartition("/")
        file = named or WEIGHTS_FILE
        url, hub = f"https://huggingface.co/{repo}", f"hf://{repo}/{file}"
        return self._weights(Published(repo.split("/")[0], file, url, hub))

    def _weights(self, published: Published) -> Weights:
        return Weights(self._place("weights"), self.weights, self.weights_sha256, published)

    def _place(self, setting: str) -> str:
        return f"rewards.{self.name}.{setting}"


def check_prompts(
    reward: str,
    batch: ScoringBatch,
    count_tokens: Callable[[str], int],
    context_length: int,
    long_prompts: LongPrompts,
) -> None:
    """Log, or refuse with an InputError, prompts longer than the model reads, marks included; once per batch."""
    lengths = {prompt: count_tokens(prompt) for prompt in dict.fromkeys(batch.prompts)}
    long = [row for row, prompt in enumerate(batch.prompts) if lengths[prompt] > context_length]
    if not long:
        return
    first, tokens = batch.sample_ids[long[0]], lengths[batch.prompts[long[0]]]
    if long_prompts == "refuse":
        hint = (
            f"The model reads {context_length} tokens. Shorten the prompt, or set `long_prompts: cut` to score "
            "against its beginning."
        )
        raise InputError(f"rewards.{reward}, sample {first}", f"prompt of {tokens} tokens", hint)
    _LOGGER.warning(
        "rewards.%s: %d of %d prompts are longer than the %d tokens that the model reads, and are scored by their "
        "beginning; the first belongs to sample %s and has %d tokens",
        *(reward, len(long), len(batch), context_length, first, tokens),
    )


def is_config_file(model: str) -> bool:
    """Say whether the setting is the path of a configuration file and not a tag."""
    return model.endswith(".json")


def find_architecture(place: str, model: str, release: str | None) -> ClipArchitecture:
    """Find the network of the settings `model` and ``pretrained``, next to it, or raise InputError."""
    if is_config_file(model):
        return _from_file(place, model, release)
    _require_tag(place, model)
    network = json.loads((_configs_folder() / f"{model}.json").read_text())
    _check_plain(place, model, network)
    known = _release(f"{place.rsplit('.', 1)[0]}.pretrained", model, release)
    if bool(network.get("quick_gelu")) != bool(known.get("quick_gelu")):
        twin = model.removesuffix("-quickgelu") if network.get("quick_gelu") else f"{model}-quickgelu"
        activation = "QuickGELU" if known.get("quick_gelu") else "GELU"
        hint = (
            f"The weights {release or DEFAULT_RELEASE} were trained with {activation}, which this network has not, "
            f"and would give wrong scores without an error. Set {twin}, or `pretrained` to the release of your weights."
        )
        raise InputError(place, model, hint)
    preparation = {key: known[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in known}
    return ClipArchitecture(model, release or DEFAULT_RELEASE, network, preparation)


def _release(place: str, model: str, release: str | None) -> Mapping[str, Any]:
    import open_clip

    known: Mapping[str, Any] = open_clip.get_pretrained_cfg(model, release or DEFAULT_RELEASE)
    if known:
        return known
    releases = ", ".join(open_clip.list_pretrained_tags_by_model(model)) or "none"
    hint = f"Set the release of {model} that the weights are; open_clip knows {releases}."
    raise InputError(place, release, hint)


def _from_file(place: str, model: str, release: str | None) -> ClipArchitecture:
    if release is not None:
        hint = "Leave it out: a configuration file says how its weights were trained."
        raise InputError(f"{place.rsplit('.', 1)[0]}.pretrained", release, hint)
    file = Path(model).expanduser()
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(place, model, f"It cannot be read as JSON ({error}). Set an open_clip_config.json.") from error
    network = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(network, dict) or not {"embed_dim", "vision_cfg", "text_cfg"} <= network.keys():
        raise InputError(place, model, "It lacks embed_dim, vision_cfg or text_cfg. Set an open_clip_config.json.")
    _check_plain(place, model, network)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return ClipArchitecture(f"config-{digest[:16]}", None, network, config.get("preprocess_cfg", {}))


def _check_plain(place: str, model: str, network: Mapping[str, Any]) -> None:
    foreign = [key for section, key in _OTHER_TOWERS if key in network[section]]
    foreign += [key for key in ("custom_text", "multimodal_cfg") if network.get(key)]
    if foreign:
        hint = (
            f"This architecture has parts of other libraries ({', '.join(foreign)}), which would be downloaded "
            "unchecked. Set one of OpenAI's or LAION's own, such as ViT-L-14-quickgelu or ViT-H-14."
        )
        raise InputError(place, model, hint)


def _require_tag(place: str, model: str) -> None:
    if model in _tags():
        return
    close = difflib.get_close_matches(model, _tags(), n=3)
    hint = "Set a tag of open_clip, such as ViT-L-14-quickgelu, or the path of an open_clip_config.json."
    raise InputError(place, model, f"Did you mean {' or '.join(close)}? {hint}" if close else hint)


def _configs_folder() -> Path:
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None, "open_clip is a dependency of the project"
    assert spec.submodule_search_locations, "and a package"
    return Path(next(iter(spec.submodule_search_locations))) / "model_configs"


@functools.cache
def _tags() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in _configs_folder().glob("*.json")))
