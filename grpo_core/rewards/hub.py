"""Files and models on the Hugging Face Hub: their names, the local cache, downloads.

A file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a branch, a tag or
a commit); in a file's name the revision may also follow the repository, as fsspec writes it
(``hf://owner/repo@revision/path/in/repo``). Without one it is the branch ``main``.
"""

import fnmatch
import http.client
import json
import re
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import InputError, first_line

HUB_PREFIX = "hf://"
SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
"""Weight files of a transformers model."""

DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model")
"""Configuration and tokenizer of a transformers model."""

_FILE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")
_MODEL = re.compile(r"(hf://)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """A file (None for a complete model) in a repository at a revision (None for ``main``)."""

    repo: str
    file: str | None
    revision: str | None

    @classmethod
    def of_file(cls, name: str) -> "HubName | None":
        """Read the name of a file; None if it is malformed."""
        match = _FILE.fullmatch(name)
        if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
            return None
        return cls(match["repo"], match["file"], match["first"] or match["last"])

    @classmethod
    def of_model(cls, name: str) -> "HubName | None":
        """Read the name of a model; None if it is malformed."""
        match = _MODEL.fullmatch(name)
        return None if match is None else cls(match["repo"], None, match["revision"])

    def cached(self) -> str | None:
        """Return the file, or the folder of a complete model, in the local cache; None without one. No network."""
        import huggingface_hub

        try:
            found = huggingface_hub.try_to_load_from_cache(
                self.repo, self.file or "config.json", revision=self.revision
            )
        except ValueError:
            # A name that the Hub does not accept, so the cache never contains it.
            return None
        if not isinstance(found, str) or self.file is not None:
            return found if isinstance(found, str) else None
        # An interrupted download may have ended after the configuration.
        return None if missing_weights(Path(found).parent) else str(Path(found).parent)

    def download(self) -> str:
        """Download into the local cache and return the file or folder; raises what :func:`one_message` turns."""
        import huggingface_hub

        if self.file is not None:
            return huggingface_hub.hf_hub_download(self.repo, self.file, revision=self.revision)
        return huggingface_hub.snapshot_download(self.repo, revision=self.revision, allow_patterns=list(self.sizes()))

    def sizes(self) -> Mapping[str, int]:
        """Ask for the bytes of each file of a download: pickled weights only where there are no others."""
        import huggingface_hub

        if self.file is not None:
            url = huggingface_hub.hf_hub_url(self.repo, self.file, revision=self.revision)
            return {self.file: huggingface_hub.get_hf_file_metadata(url).size or 0}
        info = huggingface_hub.HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or () if "/" not in each.rfilename}
        wanted = (*DESCRIPTIONS, SAFETENSORS if fnmatch.filter(sizes, SAFETENSORS) else PICKLES)
        return {name: size for name, size in sizes.items() if any(fnmatch.fnmatch(name, each) for each in wanted)}


def weights_pattern(folder: Path) -> str:
    """Choose which weight files transformers reads: pickled ones only where there are no others."""
    return SAFETENSORS if any(folder.glob(SAFETENSORS)) else PICKLES


def missing_weights(folder: Path) -> str | None:
    """Return the first weight file that the folder lacks."""
    found = {file.name for file in folder.glob(weights_pattern(folder))}
    if not found:
        return "model.safetensors"
    # Large models come in parts, and a download may have ended between two of them.
    for index in folder.glob(f"{weights_pattern(folder)}.index.json"):
        parts: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        if parts - found:
            return min(parts - found)
    return None


@contextmanager
def one_message(place: str, value: str | None) -> Iterator[None]:
    """Turn every failure of the Hub or of another server into one InputError with this place and value."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    # HTTPError is the base of all that the Hub's HTTP client raises, a broken connection among it.
    except (
        *(errors.HTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError),  # type: ignore[attr-defined]
        *(httpx.HTTPError, http.client.HTTPException, OSError),
    ) as error:
        if isinstance(error, urllib.error.HTTPError):
            # It is the open answer itself.
            error.close()
        raise InputError(place, value, _download_hint(error)) from error


def _download_hint(error: Exception) -> str:
    from huggingface_hub import errors

    hints: dict[type[Exception], str] = {
        errors.GatedRepoError: "Its owners ask for consent: accept the terms on its page, then run `hf auth login`.",
        errors.RepositoryNotFoundError: "There is no such repository. If it is private, run `hf auth login`.",
        errors.RevisionNotFoundError: "The repository has no such revision. Set a branch, a tag or a complete commit.",
        errors.RemoteEntryNotFoundError: "The repository has no such file. Its page on the Hub lists them under Files.",
    }
    other = f"It could not be downloaded ({first_line(error)}). Check the network and try again, or set a local path."
    return next((hint for kind, hint in hints.items() if isinstance(error, kind)), other)
