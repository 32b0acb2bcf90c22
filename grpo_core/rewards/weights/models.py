"""A whole transformers model, in a local folder or on the Hugging Face Hub: is it there, which is it, does it fit."""

import fnmatch
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from grpo_core.errors import InputError
from grpo_core.rewards.weights.files import file_sha256
from grpo_core.rewards.weights.hub import HubFile, ask_hub, cached_file, find_hub_problem, parse_hub_model

_DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model")
_SAFETENSORS = "model*.safetensors"
_PICKLES = "pytorch_model*.bin"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def find_model_problem(
    place: str, source: str | None, sha256: str | None = None, published: str = "owner/repo"
) -> InputError | None:
    """What is wrong with a model's folder or name, without loading or downloading anything; None where nothing is.

    A model of the Hub that is not in the local cache is no problem as long as the Hub may be asked.

    Args:
        place: of the setting that holds it, for messages.
        source: a folder, or ``owner/repo[@revision]``; None where it is not set.
        sha256: what :func:`model_sha256` must give, whole or its first digits; the digest's setting is the same with
            ``_sha256`` added.
        published: the model's name on the Hub, for messages.
    """
    if not isinstance(source, str) or not source.strip():
        hint = f"Set the folder of a model as transformers saves it, or its name on the Hub: {published}."
        return InputError(place, source, hint)
    folder = _local_folder(source)
    if folder is None:
        if parse_hub_model(source) is None:
            hint = f"There is no such folder, and no such name on the Hub. Give a folder, or a name: {published}."
            return InputError(place, source, hint)
        folder = _cached_snapshot(source)
        if folder is None:
            return find_hub_problem(place, source)
    return _find_folder_problem(place, source, folder) or _find_digest_problem(place, source, folder, sha256)


def model_folder(place: str, source: str | None, sha256: str | None = None, published: str = "owner/repo") -> Path:
    """The folder that holds the model on this machine; a model of the Hub is downloaded unless the cache holds it.

    Args:
        place: of the setting that holds the source, for messages.
        source: a folder, or ``owner/repo[@revision]``.
        sha256: what :func:`model_sha256` must give, whole or its first digits.
        published: the model's name on the Hub, for messages.

    Raises:
        InputError: as :func:`find_model_problem`, or the Hub does not give it.
    """
    problem = find_model_problem(place, source, sha256, published)
    if problem is not None:
        raise problem
    assert source is not None, "what is not set is a problem"
    found = _local_folder(source) or _cached_snapshot(source)
    if found is not None:
        return found
    fetched = _fetch_snapshot(place, source)
    problem = _find_folder_problem(place, source, fetched) or _find_digest_problem(place, source, fetched, sha256)
    if problem is not None:
        raise problem
    return fetched


def model_sha256(source: str, place: str = "model") -> str:
    """One sha256 over the names and bytes of the model's files: weights, configuration, tokenizer.

    The same model has the same digest in a folder and in the Hub's cache. What else lies there does not count: a
    model card, or pickled weights beside .safetensors ones.

    Args:
        source: a folder, or ``owner/repo[@revision]``, which is downloaded where the cache does not hold it.
        place: of the setting that holds the source, for messages.

    Raises:
        InputError: as :func:`model_folder`; a file cannot be read.
    """
    return _folder_sha256(place, model_folder(place, source))


def load_pretrained(place: str, source: str, model_class: Any, **settings: object) -> nn.Module:
    """The model in fp32 on the CPU, frozen and in evaluation mode; .safetensors, or else weights without code.

    Args:
        place: of the setting that holds the source, for messages.
        source: a folder, or ``owner/repo[@revision]``.
        model_class: a class of transformers with ``from_pretrained``.
        **settings: further arguments of ``from_pretrained``.

    Raises:
        InputError: as :func:`model_folder`; the files are broken, hold code, or are of another kind of model.
    """
    folder = model_folder(place, source)
    try:
        model, report = model_class.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=_weights_pattern(folder) == _SAFETENSORS,
            weights_only=True,
            dtype=torch.float32,
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = f"It cannot be loaded as {model_class.__name__} ({reason}). Give a complete model of that kind."
        raise InputError(place, source, hint) from error
    # transformers fills what it does not find with random numbers, and only logs that.
    broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if broken:
        hint = f"Its weights lack {broken[0]} ({len(broken)} such). Give a complete {model_class.__name__}."
        raise InputError(place, source, hint)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def load_tokenizer(place: str, source: str, **settings: object) -> Any:
    """The model's tokenizer.

    Args:
        place: of the setting that holds the source, for messages.
        source: a folder, or ``owner/repo[@revision]``.
        **settings: further arguments of ``from_pretrained``.

    Raises:
        InputError: as :func:`model_folder`; there is no tokenizer beside the model, or a broken one.
    """
    from transformers import AutoTokenizer

    folder = model_folder(place, source)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        hint = "The folder holds no tokenizer. Copy tokenizer.json of the model that it was fine-tuned from into it."
        raise InputError(place, source, hint)
    try:
        # A cut-off file makes the tokenizers package raise an Exception of no class of its own.
        for file in folder.glob("tokenizer*.json"):
            json.loads(file.read_text(encoding="utf-8"))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = f"Its tokenizer cannot be loaded ({reason}). Give a complete model."
        raise InputError(place, source, hint) from error


def _local_folder(source: str) -> Path | None:
    folder = Path(source).expanduser()
    explicit = source.startswith(("/", "~", "."))
    return folder if folder.is_dir() or explicit else None


def _find_folder_problem(place: str, source: str, folder: Path) -> InputError | None:
    if not folder.is_dir():
        return InputError(place, source, "There is no such folder. Give a model's folder, or owner/repo on the Hub.")
    if not (folder / "config.json").is_file():
        return InputError(place, source, "The folder holds no config.json. Give one that transformers saved.")
    missing = _missing_weights(folder)
    if missing is not None:
        return InputError(place, source, f"The folder does not hold {missing}. Give a complete model.")
    return None


def _find_digest_problem(place: str, source: str, folder: Path, sha256: str | None) -> InputError | None:
    if sha256 is None:
        return None
    try:
        found = _folder_sha256(place, folder)
    except InputError as error:
        return error
    if found.startswith(sha256.lower()):
        return None
    hint = f"The sha256 of the model {source} is {found}. Fetch it again, or set its own digest."
    return InputError(f"{place}_sha256", sha256, hint)


def _folder_sha256(place: str, folder: Path) -> str:
    digest = hashlib.sha256()
    for file in _model_files(folder):
        try:
            found = file_sha256(str(file))
        except OSError as error:
            hint = f"The file cannot be read ({error.strerror}). Make it readable."
            raise InputError(place, str(file), hint) from error
        digest.update(f"{found}  {file.name}\n".encode())
    return digest.hexdigest()


def _weights_pattern(folder: Path) -> str:
    """Which of its weight files transformers shall read: pickled ones only where there are no others."""
    return _SAFETENSORS if any(folder.glob(_SAFETENSORS)) else _PICKLES


def _missing_weights(folder: Path) -> str | None:
    """The first weight file that the folder should hold and does not."""
    found = {file.name for file in folder.glob(_weights_pattern(folder))}
    if not found:
        return "model.safetensors"
    # Large models come in parts, and a download may have ended between two of them.
    for index in folder.glob(f"{_weights_pattern(folder)}.index.json"):
        parts: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        if parts - found:
            return min(parts - found)
    return None


def _model_files(folder: Path) -> list[Path]:
    """The files that the model is loaded from, by name."""
    patterns = (*_DESCRIPTIONS, _weights_pattern(folder))
    return sorted((file for pattern in patterns for file in folder.glob(pattern)), key=lambda file: file.name)


def _cached_snapshot(source: str) -> Path | None:
    """The cache's folder of the model; None where it lacks its configuration or its weights."""
    model = parse_hub_model(source)
    assert model is not None, "checked before"
    found = cached_file(HubFile(model.repo, "config.json", model.revision))
    if found is None:
        return None
    folder = Path(found).parent
    # An interrupted download may have come as far as the configuration.
    return folder if _missing_weights(folder) is None else None


def _fetch_snapshot(place: str, source: str) -> Path:
    import huggingface_hub

    model = parse_hub_model(source)
    assert model is not None, "checked before"

    def fetch() -> str:
        listed = huggingface_hub.HfApi().list_repo_files(model.repo, revision=model.revision)
        top = [file for file in listed if "/" not in file]
        weights = _SAFETENSORS if fnmatch.filter(top, _SAFETENSORS) else _PICKLES
        return huggingface_hub.snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=[*_DESCRIPTIONS, weights],
            ignore_patterns=["*/*"],
        )

    return Path(ask_hub(place, str(model), fetch))
