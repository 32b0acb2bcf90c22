"""Trained weights as a model of their own: adapters merged into their base, full weights as they are stored."""

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_core.pipeline_files import INDEX_FILE, pipeline_parts
from grpo_core.policies.trained.settings import ADAPTER_FILE

if TYPE_CHECKING:
    from torch import nn

FULL_WEIGHTS = ("model*.safetensors", "diffusion_pytorch_model*.safetensors")
"""Patterns of the files with every weight of a model, as transformers and diffusers name them."""

_EXPECTED: Mapping[str, type[Warning]] = MappingProxyType(
    {
        # peft reads an attribute of transformers by its previous name.
        "`is_gradient_checkpointing`": FutureWarning,
        ".*(`tie_word_embeddings=True`|no longer tied)": UserWarning,
        # It transposes matrices as those of GPT-2's layers, and says so for each.
        "fan_in_fan_out is set to": UserWarning,
        # It looks among modules for its own pattern of experts, which are parameters.
        "The following (rank|alpha)_pattern keys": RuntimeWarning,
    }
)
"""What peft warns of while it adds or merges adapters, as regular expressions."""

_COPIED = (*(f"{pattern}*" for pattern in FULL_WEIGHTS), "config.json", "generation_config.json")


@contextmanager
def expected_warnings() -> Iterator[None]:
    """Leave out what peft says of models as they are meant to be."""
    with warnings.catch_warnings():
        for message, category in _EXPECTED.items():
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


@dataclass(frozen=True)
class TrainedPart:
    """A trained part of a pipeline: the folder of its weights or adapter, and what loads an adapter's model."""

    weights: Path
    load_base: Callable[[], Any]


def save_whole(weights: Path, folder: Path, load_base: Callable[[], Any]) -> None:
    """Write a model with trained weights as transformers or diffusers loads it: its configuration and safetensors.

    An adapter in the folder `weights` is merged into its base, full weights are copied. ValueError for weights that are
    not finite.
    """
    folder.mkdir(exist_ok=True)
    if not (weights / ADAPTER_FILE).is_file():
        for path in (path for pattern in _COPIED for path in sorted(weights.glob(pattern))):
            shutil.copyfile(path, folder / path.name)
        return
    from peft import PeftModel

    with expected_warnings():
        adapted: Any = PeftModel.from_pretrained(load_base(), str(weights))
        _untie(adapted)
        merged = adapted.merge_and_unload(safe_merge=True)
    merged.save_pretrained(folder)


def tied_layers(model: "nn.Module") -> "dict[str, nn.Module]":
    """Return the layers with adapters whose weights other modules use too, by their names; the head, or embeddings."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    bases = ((name, each) for name, each in model.named_modules() if name.endswith(".base_layer"))
    return {
        name.removeprefix("base_model.model.").removesuffix(".base_layer"): each
        for name, each in bases
        if any(uses[id(weight)] > 1 for weight in each.parameters())
    }


def _untie(model: Any) -> None:
    """Give a layer with an adapter weights of its own, so that what is merged into them reaches no other module."""
    from torch import nn

    for layer in tied_layers(model).values():
        for name, weight in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
        base = model.get_base_model()
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False


def save_pipeline(base: Path, folder: Path, trained: Mapping[str, TrainedPart]) -> None:
    """Write a pipeline into an empty folder, with trained weights in some parts, by name, and all other files."""
    index = json.loads(shutil.copyfile(base / INDEX_FILE, folder / INDEX_FILE).read_text())
    for name in pipeline_parts(index):
        if name in trained:
            save_whole(trained[name].weights, folder / name, trained[name].load_base)
        else:
            shutil.copytree(base / name, folder / name)
