"""Which CLIP a setting means: open_clip's tag or configuration file, and the release that its weights are of.

A weight file says neither with which activation it was trained nor how images were prepared for it. open_clip
knows both for the releases that it lists, and forgets them where weights come from a path, so they are looked up here.
"""

import difflib
import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.errors import InputError
from grpo_core.rewards.weights import PublishedWeights

DEFAULT_RELEASE = "openai"
WEIGHTS_FILE = "open_clip_model.safetensors"

_OTHER_TOWERS = (
    ("vision_cfg", "timm_model_name"),
    ("text_cfg", "hf_model_name"),
    ("text_cfg", "hf_tokenizer_name"),
)


@dataclass(frozen=True)
class ClipArchitecture:
    """A network that open_clip can build without any file but its weights.

    Attributes:
        name: open_clip's tag, or ``config-`` with the first digits of the configuration's sha256.
        release: open_clip's tag of the weights; None for a configuration file.
        network: arguments of open_clip's CLIP class.
        preparation: what to change in open_clip's default preparation of images (mean, std, ...).
    """

    name: str
    release: str | None
    network: Mapping[str, Any]
    preparation: Mapping[str, Any]

    @property
    def width(self) -> int:
        """Length of an embedding."""
        return int(self.network["embed_dim"])

    @property
    def context_length(self) -> int:
        """How many tokens of a text it reads, its two end marks among them."""
        return int(self.network["text_cfg"].get("context_length", 77))


def is_config_file(model: str) -> bool:
    """Whether the setting is the path of a configuration file and not a tag."""
    return model.endswith(".json")


def check_model_setting(place: str, model: object) -> None:
    """Refuse what is neither one of open_clip's tags nor a path that ends in .json; imports no open_clip.

    Raises:
        InputError: it is not.
    """
    if isinstance(model, str) and (is_config_file(model) or model in _tags()):
        return
    close = difflib.get_close_matches(str(model), _tags(), n=3)
    hint = "Set a tag of open_clip, such as ViT-L-14-quickgelu, or the path of an open_clip_config.json."
    raise InputError(place, model, f"Did you mean {' or '.join(close)}? {hint}" if close else hint)


def find_architecture(place: str, model: str, release: str | None) -> ClipArchitecture:
    """The network that the settings mean.

    Args:
        place: of the setting `model`, for messages; that of the release stands beside it under ``pretrained``.
        model: a tag of open_clip or the path of a configuration file as open_clip writes it beside its weights.
        release: open_clip's name of the pretrained weights; None means ``openai`` with a tag.

    Raises:
        InputError: no such configuration, release, or a release that was trained with another activation.
    """
    if is_config_file(model):
        return _from_file(place, model, release)
    check_model_setting(place, model)
    network = json.loads((_configs_folder() / f"{model}.json").read_text())
    _check_plain(place, model, network)
    known = _release(f"{place.rsplit('.', 1)[0]}.pretrained", model, release)
    if bool(network.get("quick_gelu")) != bool(known.get("quick_gelu")):
        twin = model.removesuffix("-quickgelu") if network.get("quick_gelu") else f"{model}-quickgelu"
        activation = "QuickGELU" if known.get("quick_gelu") else "GELU"
        hint = (
            f"The weights {release or DEFAULT_RELEASE} were trained with {activation}, which this network has not, and "
            f"would score without complaint, and wrongly. Set {twin}, or `pretrained` to the release of your weights."
        )
        raise InputError(place, model, hint)
    preparation = {key: known[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in known}
    return ClipArchitecture(model, release or DEFAULT_RELEASE, network, preparation)


def published_weights(model: str, release: str | None) -> PublishedWeights:
    """Where the weights of that release are published, as far as open_clip knows."""
    import open_clip

    known = open_clip.get_pretrained_cfg(model, release or DEFAULT_RELEASE)
    repo = str(known.get("hf_hub", "")).strip("/")
    if not repo:
        return PublishedWeights(WEIGHTS_FILE, "open_clip", "https://github.com/mlfoundations/open_clip", digest="")
    hub = f"hf://{repo}/{WEIGHTS_FILE}"
    return PublishedWeights(WEIGHTS_FILE, repo.split("/")[0], f"https://huggingface.co/{repo}", hub, digest="")


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
        hint = "Leave it out: a configuration file says itself how its weights were trained."
        raise InputError(f"{place.rsplit('.', 1)[0]}.pretrained", release, hint)
    file = Path(model).expanduser()
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            place, model, f"It cannot be read as JSON ({error}). Give an open_clip_config.json."
        ) from error
    network = config.get("model_cfg", config) if isinstance(config, dict) else None
    if not isinstance(network, dict) or not {"embed_dim", "vision_cfg", "text_cfg"} <= network.keys():
        raise InputError(place, model, "It lacks embed_dim, vision_cfg or text_cfg. Give an open_clip_config.json.")
    _check_plain(place, model, network)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return ClipArchitecture(f"config-{digest[:16]}", None, network, config.get("preprocess_cfg", {}))


def _check_plain(place: str, model: str, network: Mapping[str, Any]) -> None:
    foreign = [key for section, key in _OTHER_TOWERS if key in network[section]]
    foreign += [key for key in ("custom_text", "multimodal_cfg") if network.get(key)]
    if foreign:
        hint = (
            f"This architecture has parts from elsewhere ({', '.join(foreign)}), which would be fetched without being "
            "checked. Set one of OpenAI's or LAION's own, such as ViT-L-14-quickgelu or ViT-H-14."
        )
        raise InputError(place, model, hint)


def _configs_folder() -> Path:
    spec = importlib.util.find_spec("open_clip")
    assert spec is not None, "open_clip is a dependency of the project"
    assert spec.submodule_search_locations, "and a package"
    return Path(next(iter(spec.submodule_search_locations))) / "model_configs"


@functools.cache
def _tags() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in _configs_folder().glob("*.json")))
