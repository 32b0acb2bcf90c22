"""The files of a saved diffusers pipeline; no library of models is imported."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from grpo_core.errors import InputError

PolicyKind = Literal["glm_image", "diffusers", "causal_lm", "vision_lm"]

INDEX_FILE = "model_index.json"
"""In the folder of a saved pipeline: the class of each part."""

CONFIG_FILE = "config.json"
"""In the folder of a language model."""

Parts = Mapping[str, tuple[str, str]]
"""Library and class of each network of a model by its name, which is that of its folder; empty for the model itself."""

ONE_NETWORK: Parts = MappingProxyType({"": ("transformers", "PreTrainedModel")})
"""A language model."""


def refuse_missing_folder(model: str, file: str = INDEX_FILE) -> None:
    """Raise InputError for a path that is no folder with this file, INDEX_FILE or CONFIG_FILE; hub names pass."""
    path, slashes = Path(model).expanduser(), model.count("/")
    # Some language models have a hub name of one word.
    names_folder = slashes != 1 if file == INDEX_FILE else slashes > 1
    if model.endswith(".gguf") or (path.is_dir() and not (path / file).is_file() and any(path.glob("*.gguf"))):
        hint = "Make a folder of the GGUF file first: python -m data.recipes.from_gguf FILE FOLDER (docs/models.md)."
        raise InputError("policy.model", model, hint)
    if path.is_dir():
        if not (path / file).is_file():
            raise InputError("policy.model", model, f"The folder has no {file}; give one written by save_pretrained.")
        if file == CONFIG_FILE and not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise InputError("policy.model", model, "The folder has no weights; save the model there.")
    elif path.is_absolute() or model.startswith((".", "~")) or names_folder or (slashes and path.parent.is_dir()):
        hint = f"There is no folder {path.absolute()}; give that of a saved model, or a hub name."
        raise InputError("policy.model", model, hint)


def find_model_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """Find a file of a saved model or pipeline, or of a hub name in the local cache; None if it is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        file = folder / name
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_kind(
    model: str, revision: str | None = None
) -> Literal["glm_image", "diffusers", "causal_lm", "vision_lm"] | None:
    """Read from a model's files, or a hub name's in the local cache, which kind of policy it is; None without files."""
    index = find_model_file(model, INDEX_FILE, revision)
    if index is not None:
        released = read_pipeline_file(model, index).get("_class_name") == "GlmImagePipeline"
        return "glm_image" if released else "diffusers"
    config = find_model_file(model, "config.json", revision)
    if config is None:
        return None
    processors = ("processor_config.json", "preprocessor_config.json")
    sees = any(find_model_file(model, name, revision) for name in processors)
    return "vision_lm" if sees or "vision_config" in read_pipeline_file(model, config) else "causal_lm"


def read_pipeline_file(model: str, file: Path) -> dict[str, Any]:
    """Read a configuration file of a saved pipeline; InputError if it is missing or damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = f"Its {file.parent.name}/{file.name} is missing or damaged ({error}); save the pipeline again."
        raise InputError("policy.model", model, hint) from error
    if not isinstance(content, dict):
        hint = f"Its {file.parent.name}/{file.name} is damaged; save the pipeline again."
        raise InputError("policy.model", model, hint)
    return content


def refuse_missing_parts(model: str, parts: Mapping[str, tuple[str, str]]) -> None:
    """Raise InputError for a folder without one of the parts that its index names; a hub's cache may get them later."""
    folder = Path(model).expanduser()
    for name in parts if folder.is_dir() else ():
        if not (folder / name).is_dir():
            hint = f"Its {INDEX_FILE} names {name}, and it has no such folder; save it again."
            raise InputError("policy.model", model, hint)


def refuse_missing_weights(model: str, parts: Mapping[str, tuple[str, str]]) -> None:
    """Raise InputError for a folder in which a part has no, or not all, weights in safetensors; a hub name passes."""
    folder = Path(model).expanduser()
    for name, (library, class_name) in parts.items() if folder.is_dir() else ():
        # Tokenizers, processors and schedulers have other configuration files, some of them this one as well.
        if class_name.endswith(_WITHOUT_WEIGHTS) or not (folder / name / "config.json").is_file():
            continue
        file = "diffusion_pytorch_model.safetensors" if library == "diffusers" else "model.safetensors"
        missing = [] if (folder / name / file).is_file() else _missing_shards(model, folder / name, file)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = f"Its folder {name} has no {missing[0]}{more}; download or save the pipeline again."
            raise InputError("policy.model", model, hint)


_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "Extractor", "Scheduler")
"""Endings of the classes of parts that are no networks."""


def _missing_shards(model: str, folder: Path, file: str) -> list[str]:
    """Return the missing files of weights that are stored in several; the one file itself without an index of them."""
    index = folder / f"{file}.index.json"
    if not index.is_file():
        return [file]
    shards = read_pipeline_file(model, index).get("weight_map", {}).values()
    return sorted({shard for shard in shards if not (folder / shard).is_file()})


def pipeline_parts(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each part that a pipeline's index names, by the part's name."""
    # Settings of a class may be lists as well, and a part that the pipeline was saved without is a list of null.
    found = {name: place for name, place in index.items() if isinstance(place, list) and len(place) == 2}
    return {name: (place[0], place[1]) for name, place in found.items() if all(isinstance(each, str) for each in place)}
