"""Trained weights as a model of their own: adapters merged into their base, full weights as they are stored."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.policies.pipeline_files import INDEX_FILE, pipeline_parts
from grpo_core.policies.trained.settings import ADAPTER_FILE

FULL_WEIGHTS = ("model*.safetensors", "diffusion_pytorch_model*.safetensors")
"""Patterns of the files with every weight of a model, as transformers and diffusers name them."""

_COPIED = (*(f"{pattern}*" for pattern in FULL_WEIGHTS), "config.json", "generation_config.json")


@dataclass(frozen=True)
class TrainedPart:
    """A part of a pipeline whose weights were trained.

    Attributes:
        weights: folder of its stored weights, an adapter or every weight.
        load_base: loads the model that an adapter belongs to.
    """

    weights: Path
    load_base: Callable[[], Any]


def save_whole(weights: Path, folder: Path, load_base: Callable[[], Any]) -> None:
    """Write a model with trained weights as transformers or diffusers loads it: its configuration and safetensors.

    Args:
        weights: folder of a stored component, with an adapter or with full weights.
        folder: created if it does not exist.
        load_base: loads the model that an adapter belongs to; not called for full weights.

    Raises:
        ValueError: the merged weights are not finite.
    """
    folder.mkdir(exist_ok=True)
    if not (weights / ADAPTER_FILE).is_file():
        for path in (path for pattern in _COPIED for path in sorted(weights.glob(pattern))):
            shutil.copyfile(path, folder / path.name)
        return
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft reads an attribute of transformers by its previous name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        adapted = PeftModel.from_pretrained(load_base(), str(weights))
    adapted.merge_and_unload(safe_merge=True).save_pretrained(folder)


def save_pipeline(base: Path, folder: Path, trained: Mapping[str, TrainedPart]) -> None:
    """Write a pipeline as diffusers loads it, with trained weights in some of its parts; all other files are copied.

    Args:
        base: folder of the pipeline that was trained.
        folder: empty.
        trained: the trained parts by their name in the pipeline, such as `transformer`.

    Raises:
        ValueError: merged weights are not finite.
    """
    index = json.loads(shutil.copyfile(base / INDEX_FILE, folder / INDEX_FILE).read_text())
    for name in pipeline_parts(index):
        if name in trained:
            save_whole(trained[name].weights, folder / name, trained[name].load_base)
        else:
            shutil.copytree(base / name, folder / name)
