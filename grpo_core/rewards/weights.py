"""Weights on disk or on the Hugging Face Hub, found and checked before they are loaded.

On the Hub a file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a
branch, a tag or a commit); in a file's name the revision may also follow the repository, as fsspec writes it
(``hf://owner/repo@revision/path/in/repo``). Without one it is the branch ``main``.
"""

import fnmatch
import hashlib
import http.client
import json
import re
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_core.errors import InputError
from grpo_core.seeds import file_sha256

HUB_PREFIX = "hf://"
SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
"""Weight files of a transformers model."""

_DESCRIPTIONS = ("*.json", "*.txt", "*.jinja", "*.model")
_FILE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")
_MODEL = re.compile(r"(hf://)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_SECONDS = 60.0
_OFFLINE = (
    "It is not in the local cache of the Hugging Face Hub, and HF_HUB_OFFLINE forbids downloads. Unset "
    "HF_HUB_OFFLINE, or run `hf download` once on a machine that shares the cache, or set a local path."
)


@dataclass(frozen=True)
class Published:
    """Where weights are published: one file, or a complete transformers model.

    Attributes:
        project: who publishes them.
        file: the published name of a file; empty for a model, which is a folder of files.
        url: where.
        hub: their name on the Hub (``hf://owner/repo/file``, or ``owner/repo`` for a model), if they are there.
        sha256: first digits of a file's digest; empty where they are not known.
        note: another place where they may already be, or an example, for the message.
        licence: as their publisher states it; empty where the page on the Hub does.
    """

    project: str
    file: str = ""
    url: str = ""
    hub: str | None = None
    sha256: str = ""
    note: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Weights:
    """The settings that name weights.

    Attributes:
        place: of the setting with the source, for messages; the digest's has ``_sha256`` added.
        source: a path, or a name on the Hub; None where it is not set.
        sha256: what :meth:`digest` must return, complete or its first digits. Without it, a file with the published
            name must have the published digest.
        published: where such weights come from, and whether they are a file or a model.

    Raises:
        InputError: the source is blank, or a malformed name of a file on the Hub.
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

    @property
    def setting(self) -> str:
        """The reward's setting that names them."""
        return self.place.rpartition(".")[2]

    @property
    def on_hub(self) -> bool:
        """Whether the source is a name on the Hub."""
        return self.source is not None and self._hub_name() is not None

    def problem(self) -> InputError | None:
        """Return what is wrong with the weights, without loading or downloading; None where nothing is.

        What is on the Hub and not in the local cache is no problem unless the Hub is offline.
        """
        try:
            self._find()
        except InputError as error:
            return error
        return None

    def path(self) -> str:
        """Return the checked file or folder; what is on the Hub only is downloaded.

        The local cache comes before the Hub, so that weights do not change during a run when their branch moves on.

        Raises:
            InputError: missing or wrong weights, or a failure of the Hub.
        """
        found = self._find()
        if found is None:
            found = self._download_from_hub()
            self._check(found)
        return found

    def digest(self) -> str:
        """Return the sha256 of the file, or one over the names and bytes of a model's files.

        These are weights, configuration and tokenizer. The same model has the same digest in a folder and in the Hub's
        cache. Other files in the folder do not count: a model card, or pickled weights next to .safetensors ones.

        Raises:
            InputError: as :meth:`path`; a file cannot be read.
        """
        return self._sha256_of(self.path())

    def is_here(self) -> bool:
        """Return whether something is there: in the local cache for a name on the Hub."""
        if self.source is None:
            return False
        return self._cached() is not None if self.on_hub else Path(self.source).expanduser().exists()

    def to_fetch(self, folder: Path) -> "Weights":
        """Return the same with the published weights where none are set: on the Hub, or else a file in this folder.

        Raises:
            InputError: the settings name what is missing and not published, or has another digest.
        """
        published = self.published
        default = published.hub or (str(folder / published.file) if published.file else None)
        named = self if self.source else replace(self, source=default)
        from_url = not named.on_hub and published.hub is None and published.sha256
        if named.source is None or (
            not named.on_hub and (named.is_here() or not from_url or Path(named.source).name != published.file)
        ):
            # Right or wrong, the file is the user's.
            named._find()
        return named

    def size(self) -> int | None:
        """Ask for the number of bytes that :meth:`fetch` downloads; None where the server does not say.

        Raises:
            InputError: there is no answer, or the Hub is offline.
        """
        if self.on_hub:
            self._require_online()
            return sum(self._sizes_on_hub().values())
        import httpx

        with self._one_message():
            answer = httpx.head(self.published.url, follow_redirects=True, timeout=_SECONDS).raise_for_status()
            length = answer.headers.get("Content-Length", "")
            return int(length) if length.isdigit() else None

    def fetch(self) -> str:
        """Download what is not here, from the Hub or the published address, and return the path.

        Raises:
            InputError: no answer, another digest than the published one, or a folder that cannot be written.
        """
        if self.on_hub or self.is_here():
            return self.path()
        from torch.hub import download_url_to_file

        target, expected = Path(self.source or "").expanduser(), (self.sha256 or self.published.sha256).lower()
        with self._one_message():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                download_url_to_file(self.published.url, str(target), hash_prefix=expected)
            except RuntimeError as error:
                hint = f"{self.published.url} returned another file ({error}). Try again, or get the file elsewhere."
                raise InputError(f"{self.place}_sha256", expected, hint) from error
        return self.path()

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
        """Say how to get the file."""
        published = self.published
        note = f" ({published.note})" if published.note else ""
        local = (
            f"Download {published.file}, published by {published.project} at {published.url}{note}, "
            f"and set `{self.setting}` in the reward's settings to its path"
        )
        return f"{local}, or to {published.hub}." if published.hub else f"{local}."

    def _hub_name(self) -> tuple[str, str | None, str | None] | None:
        """Return repository, file (None for a model) and revision of a name on the Hub; None for a path."""
        source = self.source or ""
        if self.published.file:
            if not source.startswith(HUB_PREFIX):
                return None
            match = _FILE.fullmatch(source)
            if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
                hint = "Name one file as hf://owner/repo/path/in/repo; add @revision for another branch, tag or commit."
                raise self.error(hint)
            return match["repo"], match["file"], match["first"] or match["last"]
        if Path(source).expanduser().is_dir() or source.startswith(("/", "~", ".")):
            return None
        match = _MODEL.fullmatch(source)
        if match is None:
            example = self.published.hub or self.published.note
            raise self.error(f"It is neither a folder nor a name on the Hub: {example}.")
        return match["repo"], None, match["revision"]

    def _required_name(self) -> tuple[str, str | None, str | None]:
        named = self._hub_name()
        assert named is not None, "only what is on the Hub is asked for there"
        return named

    def _find(self) -> str | None:
        """Return the checked file or folder; None where it is on the Hub only. Raises as :meth:`path`."""
        if self.source is None:
            raise self._not_set()
        found = self._cached() if self.on_hub else str(Path(self.source).expanduser())
        if found is None:
            self._require_online()
        else:
            self._check(found)
        return found

    def _cached(self) -> str | None:
        """Return where the local cache has all of what the Hub has under the name; uses no network."""
        import huggingface_hub

        repo, file, revision = self._required_name()
        try:
            found = huggingface_hub.try_to_load_from_cache(repo, file or "config.json", revision=revision)
        except ValueError:
            # A name that the Hub does not accept, so the cache never contains it.
            return None
        if not isinstance(found, str) or file is not None:
            return found if isinstance(found, str) else None
        # An interrupted download may have ended after the configuration.
        return None if _missing_weights(Path(found).parent) else str(Path(found).parent)

    def _download_from_hub(self) -> str:
        import huggingface_hub

        repo, file, revision = self._required_name()
        with self._one_message():
            if file is not None:
                return huggingface_hub.hf_hub_download(repo, file, revision=revision)
            return huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(self._sizes_on_hub()))

    def _sizes_on_hub(self) -> Mapping[str, int]:
        """Return the files that a download takes, with their bytes: pickled weights only where there are no others."""
        import huggingface_hub

        repo, file, revision = self._required_name()
        with self._one_message():
            if file is not None:
                url = huggingface_hub.hf_hub_url(repo, file, revision=revision)
                return {file: huggingface_hub.get_hf_file_metadata(url).size or 0}
            info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or () if "/" not in each.rfilename}
        wanted = (*_DESCRIPTIONS, SAFETENSORS if fnmatch.filter(sizes, SAFETENSORS) else PICKLES)
        return {name: size for name, size in sizes.items() if any(fnmatch.fnmatch(name, each) for each in wanted)}

    def _require_online(self) -> None:
        import huggingface_hub

        if huggingface_hub.is_offline_mode():
            raise self.error(_OFFLINE)

    @contextmanager
    def _one_message(self) -> Iterator[None]:
        """Turn every failure of the Hub or of another server into one message."""
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
            value = self.source if self.on_hub else self.published.url
            raise InputError(self.place, value, _download_hint(error)) from error

    def _check(self, found: str) -> None:
        """Refuse what is missing, incomplete, or of another digest."""
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
        missing = _missing_weights(folder)
        if missing is not None:
            raise self.error(f"The folder does not contain {missing}. Set a complete model.")

    def _sha256_of(self, found: str) -> str:
        if self.published.file:
            return self._file_sha256(found)
        folder, digest = Path(found), hashlib.sha256()
        patterns = (*_DESCRIPTIONS, weights_pattern(folder))
        for file in sorted((f for pattern in patterns for f in folder.glob(pattern)), key=lambda file: file.name):
            digest.update(f"{self._file_sha256(str(file))}  {file.name}\n".encode())
        return digest.hexdigest()

    def _file_sha256(self, file: str) -> str:
        try:
            return file_sha256(file)
        except OSError as error:
            hint = f"The file cannot be read ({error.strerror}). Make it readable."
            raise InputError(self.place, file, hint) from error


def weights_pattern(folder: Path) -> str:
    """Choose which weight files transformers reads: pickled ones only where there are no others."""
    return SAFETENSORS if any(folder.glob(SAFETENSORS)) else PICKLES


def _missing_weights(folder: Path) -> str | None:
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


def _download_hint(error: Exception) -> str:
    from huggingface_hub import errors

    hints: dict[type[Exception], str] = {
        errors.GatedRepoError: "Its owners ask for consent: accept the terms on its page, then run `hf auth login`.",
        errors.RepositoryNotFoundError: "There is no such repository. If it is private, run `hf auth login`.",
        errors.RevisionNotFoundError: "The repository has no such revision. Set a branch, a tag or a complete commit.",
        errors.RemoteEntryNotFoundError: "The repository has no such file. Its page on the Hub lists them under Files.",
    }
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    other = f"It could not be downloaded ({reason}). Check the network and try again, or set a local path."
    return next((hint for kind, hint in hints.items() if isinstance(error, kind)), other)
