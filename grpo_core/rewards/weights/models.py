"""A complete transformers model, in a local folder or on the Hugging Face Hub: found, identified, checked, loaded."""

import fnmatch
import hashlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from grpo_core.errors import InputError
from grpo_core.rewards.weights.files import file_sha256
from grpo_core.rewards.weights.hub import HubName, ask_hub, cached_file, find_hub_problem, parse_hub_model

_DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model")
_SAFETENSORS = "model*.safetensors"
_PICKLES = "pytorch_model*.bin"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class ModelSource:
    """The settings that name a model.

    Attributes:
        place: of the setting with the source, for messages; the digest's has ``_sha256`` added.
        source: a folder, or ``owner/repo[@revision]``; None where it is not set.
        sha256: what :meth:`digest` must return, complete or its first digits.
        published: the model's name on the Hub, for messages.

    Raises:
        InputError: the source is blank.
    """

    place: str
    source: str | None
    sha256: str | None = None
    published: str = "owner/repo"

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            raise self._error(f"Set a folder, or a name on the Hub such as {self.published}.")

    def find_problem(self) -> InputError | None:
        """Return what is wrong with the folder or the name, without loading or downloading; None where nothing is.

        A model on the Hub that is not in the local cache is no problem unless the Hub is offline.
        """
        if self.source is None:
            return self._error(f"Set a folder saved by transformers, or a name on the Hub: {self.published}.")
        folder = self._local_folder()
        if folder is None:
            name = parse_hub_model(self.source)
            if name is None:
                return self._error(f"It is neither a folder nor a name on the Hub, such as {self.published}.")
            folder = _cached_snapshot(name)
            if folder is None:
                return find_hub_problem(self.place, self.source)
        return self._find_folder_problem(folder)

    def folder(self) -> Path:
        """Return the model's folder on this machine; a model on the Hub is downloaded unless the cache has it.

        Raises:
            InputError: the model is missing, incomplete, cannot be downloaded, or has another digest.
        """
        problem = self.find_problem()
        if problem is not None:
            raise problem
        assert self.source is not None, "find_problem refuses None"
        name = parse_hub_model(self.source)
        found = self._local_folder() or (None if name is None else _cached_snapshot(name))
        if found is None:
            assert name is not None, "find_problem refuses other names"
            found = Path(ask_hub(self.place, name, lambda: _download(name)))
            problem = self._find_folder_problem(found)
            if problem is not None:
                raise problem
        return found

    def digest(self) -> str:
        """Return one sha256 over the names and bytes of the model's files: weights, configuration, tokenizer.

        The same model has the same digest in a folder and in the Hub's cache. Other files in the folder do not count: a
        model card, or pickled weights next to .safetensors ones.

        Raises:
            InputError: as :meth:`folder`; a file cannot be read.
        """
        return self._folder_sha256(self.folder())

    def load(self, model_class: Any, **settings: object) -> nn.Module:
        """Load the model in fp32 on the CPU, frozen and in evaluation mode; .safetensors, or weights without code.

        Args:
            model_class: a class of transformers with ``from_pretrained``.
            **settings: further arguments of ``from_pretrained``.

        Raises:
            InputError: as :meth:`folder`; the files are broken, contain code, or are of another kind of model.
        """
        folder, kind = self.folder(), model_class.__name__
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
            raise self._error(f"It cannot be loaded as {kind} ({_reason(error)}). Set a complete {kind}.") from error
        # transformers fills what it does not find with random numbers, and only logs that.
        broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        if broken:
            raise self._error(f"Its weights lack {broken[0]} ({len(broken)} such). Set a complete {kind}.")
        loaded: nn.Module = model.requires_grad_(False).eval()
        return loaded

    def load_tokenizer(self) -> Any:
        """Load the model's tokenizer.

        Raises:
            InputError: as :meth:`folder`; the tokenizer is missing or broken.
        """
        from transformers import AutoTokenizer

        folder = self.folder()
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise self._error("The folder has no tokenizer. Copy tokenizer.json of the model's base model into it.")
        try:
            # The tokenizers package raises a bare Exception for a truncated file.
            for file in folder.glob("tokenizer*.json"):
                json.loads(file.read_text(encoding="utf-8"))
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise self._error(f"Its tokenizer cannot be loaded ({_reason(error)}). Set a complete model.") from error

    def _error(self, hint: str) -> InputError:
        return InputError(self.place, self.source, hint)

    def _local_folder(self) -> Path | None:
        assert self.source is not None, "find_problem refuses None"
        folder = Path(self.source).expanduser()
        return folder if folder.is_dir() or self.source.startswith(("/", "~", ".")) else None

    def _find_folder_problem(self, folder: Path) -> InputError | None:
        if not folder.is_dir():
            return self._error("There is no such folder. Set a model's folder, or owner/repo on the Hub.")
        if not (folder / "config.json").is_file():
            return self._error("The folder has no config.json. Set one saved by transformers.")
        missing = _missing_weights(folder)
        if missing is not None:
            return self._error(f"The folder does not contain {missing}. Set a complete model.")
        if self.sha256 is None:
            return None
        try:
            found = self._folder_sha256(folder)
        except InputError as error:
            return error
        if found.startswith(self.sha256.lower()):
            return None
        hint = f"The sha256 of the model {self.source} is {found}. Download it again, or set its digest."
        return InputError(f"{self.place}_sha256", self.sha256, hint)

    def _folder_sha256(self, folder: Path) -> str:
        digest = hashlib.sha256()
        patterns = (*_DESCRIPTIONS, _weights_pattern(folder))
        for file in sorted((f for pattern in patterns for f in folder.glob(pattern)), key=lambda file: file.name):
            try:
                found = file_sha256(str(file))
            except OSError as error:
                hint = f"The file cannot be read ({error.strerror}). Make it readable."
                raise InputError(self.place, str(file), hint) from error
            digest.update(f"{found}  {file.name}\n".encode())
        return digest.hexdigest()


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _weights_pattern(folder: Path) -> str:
    """Choose which weight files transformers reads: pickled ones only where there are no others."""
    return _SAFETENSORS if any(folder.glob(_SAFETENSORS)) else _PICKLES


def _missing_weights(folder: Path) -> str | None:
    """Return the first weight file that the folder lacks."""
    found = {file.name for file in folder.glob(_weights_pattern(folder))}
    if not found:
        return "model.safetensors"
    # Large models come in parts, and a download may have ended between two of them.
    for index in folder.glob(f"{_weights_pattern(folder)}.index.json"):
        parts: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        if parts - found:
            return min(parts - found)
    return None


def _cached_snapshot(name: HubName) -> Path | None:
    """Return the cache's folder of the model; None where it lacks the configuration or weights."""
    found = cached_file(HubName(name.repo, name.revision, "config.json"))
    # An interrupted download may have ended after the configuration.
    return Path(found).parent if found is not None and _missing_weights(Path(found).parent) is None else None


def _download(name: HubName) -> str:
    import huggingface_hub

    listed = huggingface_hub.HfApi().list_repo_files(name.repo, revision=name.revision)
    top = [file for file in listed if "/" not in file]
    weights = _SAFETENSORS if fnmatch.filter(top, _SAFETENSORS) else _PICKLES
    return huggingface_hub.snapshot_download(
        name.repo, revision=name.revision, allow_patterns=[*_DESCRIPTIONS, weights], ignore_patterns=["*/*"]
    )
