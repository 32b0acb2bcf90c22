"""Files and models on the Hugging Face Hub: their names, the local cache, downloads.

A file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a branch, a tag or
a commit); in a file's name the revision may also follow the repository, as fsspec writes it
(``hf://owner/repo@revision/path/in/repo``). Without one it is the branch ``main``.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_core.hub import PICKLES, SAFETENSORS, cached_folder, plan_download

HUB_PREFIX = "hf://"

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

        if self.file is None:
            folder = cached_folder(self.repo, self.revision)
            # Without a list of the repository's files it may be what an interrupted download has left.
            return None if folder is None or missing_weights(folder) else str(folder)
        try:
            found = huggingface_hub.try_to_load_from_cache(self.repo, self.file, revision=self.revision)
        except ValueError:
            # A name that the Hub does not accept, so the cache never contains it.
            return None
        return found if isinstance(found, str) else None

    def download(self) -> str:
        """Download into the local cache and return the file or folder; raises what `one_message` turns."""
        import huggingface_hub

        if self.file is None:
            return str(plan_download(self.repo, self.revision).run())
        return huggingface_hub.hf_hub_download(self.repo, self.file, revision=self.revision)


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
