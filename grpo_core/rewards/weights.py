"""Weights on disk or on the Hugging Face Hub, found and checked before they are loaded.

On the Hub a file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``, of the branch ``main`` unless it ends in
``@revision`` (a branch, a tag or a commit), which may also follow a file's repository, as fsspec writes it.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from grpo_core.errors import InputError
from grpo_core.hub import DESCRIPTIONS, PICKLES, SAFETENSORS, cached_folder, offline_hint, one_message, plan_download
from grpo_core.seeds import file_sha256

HUB_PREFIX = "hf://"

FILE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")
MODEL = re.compile(r"(hf://)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<last>[\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """A file (None for a complete model) in a repository at a revision (None for ``main``)."""

    repo: str
    file: str | None
    revision: str | None

    @classmethod
    def read(cls, name: str, pattern: re.Pattern[str]) -> "HubName | None":
        """Read a name of this form, FILE or MODEL; None if it is malformed."""
        match = pattern.fullmatch(name)
        found = match.groupdict() if match is not None else {}
        file, first, last = (found.get(part) for part in ("file", "first", "last"))
        if match is None or (first and last) or ".." in (file or "").split("/"):
            return None
        return cls(found["repo"], file, first or last)

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


def _values(file: Path) -> int:
    if file.suffix != ".safetensors":
        return file.stat().st_size // 4
    try:
        with safe_open(file, "pt") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except SafetensorError:
        # Loading will say what is wrong with it.
        return 0


@dataclass(frozen=True)
class Published:
    """Where weights are published: one file, or a complete transformers model.

    Attributes:
        project: who publishes them.
        file: the published name of a file; empty for a model, which is a folder of files.
        hub: their name on the Hub (``hf://owner/repo/file``, or ``owner/repo`` for a model), if they are there.
        sha256: first digits of a file's digest; empty where they are not known.
        note: another place where they may already be, or an example, for the message.
    """

    project: str
    file: str = ""
    url: str = ""
    hub: str | None = None
    sha256: str = ""
    note: str = ""


@dataclass(frozen=True)
class Weights:
    """The settings that name weights.

    Attributes:
        place: of the setting with the source, for messages; the digest's has ``_sha256`` added.
        source: a path, or a name on the Hub; None where it is not set.
        sha256: what :meth:`digest` must return, complete or its first digits. Without it, a file with the published
            name must have the published digest.
    """

    place: str
    source: str | None
    sha256: str | None
    published: Published

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            raise self._not_set()
        if self.source is not None and self.published.file:
            self._hub_name()

    def problem(self) -> InputError | None:
        """Return what is wrong with the weights; nothing is loaded, and online what is on the Hub is no problem."""
        try:
            self._find(download=False)
        except InputError as error:
            return error
        return None

    def path(self) -> str:
        """Return the checked file or folder, from the local cache, or downloaded if it is on the Hub; or InputError.

        With the cache first, weights do not change during a run when their branch moves on.
        """
        return self._find(download=True)

    def digest(self) -> str:
        """Return the sha256 of the file, or one over the names and bytes of a model's files.

        These are weights, configuration and tokenizer, and no others, so that a folder and the Hub's cache agree.
        InputError as :meth:`path`, or if a file cannot be read.
        """
        return self._sha256_of(self.path())

    def values(self) -> Mapping[str, int]:
        """Return the number of values of each local file by its header; pickled files have none: a value is 4 bytes."""
        try:
            found = Path(self._find(download=False) or "nowhere")
        except InputError:
            return {}
        files = sorted(found.glob(weights_pattern(found))) if found.is_dir() else [found]
        return {str(file): _values(file) for file in files if file.is_file()}

    def error(self, hint: str) -> InputError:
        """Return an error about the setting that names the weights."""
        return InputError(self.place, self.source, hint)

    def _not_set(self) -> InputError:
        published = self.published
        if published.file:
            return self.error(f"This reward needs weights that its package does not contain. {self._obtaining()}")
        return self.error(
            f"Set a folder saved by transformers, or a name on the Hub: {published.hub or published.note}."
        )

    def _obtaining(self) -> str:
        published = self.published
        note = f" ({published.note})" if published.note else ""
        local = (
            f"Download {published.file}, published by {published.project} at {published.url}{note}, "
            f"and set `{self.place.rpartition('.')[2]}` in the reward's settings to its path"
        )
        return f"{local}, or to {published.hub}." if published.hub else f"{local}."

    def _hub_name(self) -> HubName | None:
        source = self.source or ""
        if self.published.file:
            if not source.startswith(HUB_PREFIX):
                return None
            named = HubName.read(source, FILE)
            hint = "Name one file as hf://owner/repo/path/in/repo; add @revision for another branch, tag or commit."
        else:
            if Path(source).expanduser().is_dir() or source.startswith(("/", "~", ".")):
                return None
            named = HubName.read(source, MODEL)
            hint = f"It is neither a folder nor a name on the Hub: {self.published.hub or self.published.note}."
        if named is None:
            raise self.error(hint)
        return named

    def _find(self, *, download: bool) -> str:
        """Return the checked file or folder; empty where it is on the Hub only and not to be downloaded."""
        import huggingface_hub

        if self.source is None:
            raise self._not_set()
        named = self._hub_name()
        found = str(Path(self.source).expanduser()) if named is None else named.cached()
        if named is not None and found is None:
            if huggingface_hub.is_offline_mode():
                raise self.error(offline_hint(f"hf download {named.repo} {named.file or ''}".rstrip()))
            if not download:
                return ""
            with one_message(self.place, self.source, named.repo):
                found = named.download()
        assert found is not None, "a path, or a name on the Hub"
        self._check(found)
        return found

    def _check(self, found: str) -> None:
        expected = self.sha256 or ""
        if not self.published.file:
            self._check_model(Path(found))
        elif not Path(found).is_file():
            raise self.error(f"There is no such file. {self._obtaining()}")
        elif Path(found).name == self.published.file:
            expected = expected or self.published.sha256
        if not expected and not self.published.file:
            return
        digest = self._sha256_of(found)
        if not digest.startswith(expected.lower()):
            again = f" ({self.published.url})" if self.published.url else ""
            hint = f"The sha256 of {found} is {digest}. Download it again{again}, or set its digest."
            raise InputError(f"{self.place}_sha256", expected, hint)

    def _check_model(self, folder: Path) -> None:
        if not folder.is_dir():
            raise self.error("There is no such folder. Set a model's folder, or owner/repo on the Hub.")
        if not (folder / "config.json").is_file():
            raise self.error("The folder has no config.json. Set one saved by transformers.")
        missing = missing_weights(folder)
        if missing is not None:
            raise self.error(f"The folder does not contain {missing}. Set a complete model.")

    def _sha256_of(self, found: str) -> str:
        try:
            if self.published.file:
                return file_sha256(found)
            folder, digest = Path(found), hashlib.sha256()
            patterns = (*DESCRIPTIONS, weights_pattern(folder))
            for file in sorted((f for pattern in patterns for f in folder.glob(pattern)), key=lambda file: file.name):
                digest.update(f"{file_sha256(str(file))}  {file.name}\n".encode())
            return digest.hexdigest()
        except OSError as error:
            hint = f"The file cannot be read ({error.strerror}). Make it readable."
            raise InputError(self.place, error.filename or found, hint) from error
