"""A complete transformers model, in a local folder or on the Hugging Face Hub: found, identified, checked, loaded."""

import fnmatch
import hashlib
import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.weights.source import HubName, Source

_NAME = re.compile(r"(hf://)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model")
_SAFETENSORS = "model*.safetensors"
_PICKLES = "pytorch_model*.bin"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class ModelSource(Source):
    """The settings that name a model: a folder, or ``owner/repo[@revision]``.

    Attributes:
        sha256: what :meth:`digest` must return, complete or its first digits.
        published: the model's name on the Hub.
        is_example: whether that is one model among many, for messages only.

    Raises:
        InputError: the source is blank.
    """

    sha256: str | None = None
    published: str = "owner/repo"
    is_example: bool = True

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            raise self._error(f"Set a folder, or a name on the Hub such as {self.published}.")

    def digest(self) -> str:
        """Return one sha256 over the names and bytes of the model's files: weights, configuration, tokenizer.

        The same model has the same digest in a folder and in the Hub's cache. Other files in the folder do not count: a
        model card, or pickled weights next to .safetensors ones.

        Raises:
            InputError: as :meth:`path`; a file cannot be read.
        """
        return self._folder_sha256(Path(self.path()))

    def as_published(self, folder: Path) -> "ModelSource":
        """Return the same with the published model where none is set; the Hub's cache is its folder.

        Raises:
            InputError: none is set, and the published one is only an example.
        """
        if self.source is None and self.is_example:
            raise self._not_set()
        return self if self.source else replace(self, source=self.published)

    def load(self, model_class: Any, **settings: object) -> nn.Module:
        """Load the model in fp32 on the CPU, frozen and in evaluation mode; .safetensors, or weights without code.

        Raises:
            InputError: as :meth:`path`; the files are broken, contain code, or are of another kind of model.
        """
        folder, kind = Path(self.path()), model_class.__name__
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
            InputError: as :meth:`path`; the tokenizer is missing or broken.
        """
        from transformers import AutoTokenizer

        folder = Path(self.path())
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise self._error("The folder has no tokenizer. Copy tokenizer.json of the model's base model into it.")
        try:
            # The tokenizers package raises a bare Exception for a truncated file.
            for file in folder.glob("tokenizer*.json"):
                json.loads(file.read_text(encoding="utf-8"))
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise self._error(f"Its tokenizer cannot be loaded ({_reason(error)}). Set a complete model.") from error

    def _not_set(self) -> InputError:
        return self._error(f"Set a folder saved by transformers, or a name on the Hub: {self.published}.")

    def _locate(self, source: str) -> str | HubName:
        folder = Path(source).expanduser()
        if folder.is_dir() or source.startswith(("/", "~", ".")):
            return str(folder)
        match = _NAME.fullmatch(source)
        if match is None:
            raise self._error(f"It is neither a folder nor a name on the Hub, such as {self.published}.")
        return HubName(match["repo"], match["revision"])

    def _cached(self, name: HubName) -> str | None:
        found = name.cached("config.json")
        # An interrupted download may have ended after the configuration.
        return None if found is None or _missing_weights(Path(found).parent) else str(Path(found).parent)

    def _download(self, name: HubName) -> str:
        import huggingface_hub

        listed = huggingface_hub.HfApi().list_repo_files(name.repo, revision=name.revision)
        return huggingface_hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=_wanted_patterns(listed), ignore_patterns=["*/*"]
        )

    def _hub_bytes(self, name: HubName) -> int | None:
        import huggingface_hub

        info = huggingface_hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
        return sum(
            size for file, size in sizes.items() if any(fnmatch.fnmatch(file, p) for p in _wanted_patterns(sizes))
        )

    def _check(self, found: str) -> None:
        folder = Path(found)
        if not folder.is_dir():
            raise self._error("There is no such folder. Set a model's folder, or owner/repo on the Hub.")
        if not (folder / "config.json").is_file():
            raise self._error("The folder has no config.json. Set one saved by transformers.")
        missing = _missing_weights(folder)
        if missing is not None:
            raise self._error(f"The folder does not contain {missing}. Set a complete model.")
        if self.sha256 is None:
            return
        digest = self._folder_sha256(folder)
        if not digest.startswith(self.sha256.lower()):
            hint = f"The sha256 of the model {self.source} is {digest}. Download it again, or set its digest."
            raise InputError(f"{self.place}_sha256", self.sha256, hint)

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


def _wanted_patterns(files: Iterable[str]) -> list[str]:
    """Return patterns of the files of a repository that a model is loaded from."""
    top = [file for file in files if "/" not in file]
    return [*_DESCRIPTIONS, _SAFETENSORS if fnmatch.filter(top, _SAFETENSORS) else _PICKLES]


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
