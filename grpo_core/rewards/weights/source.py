"""Weights on disk or on the Hugging Face Hub, found and checked before they are loaded.

On the Hub a file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a
branch, a tag or a commit); in a file's name the revision may also follow the repository, as fsspec writes it
(``hf://owner/repo@revision/path/in/repo``). Without one it is the branch ``main``.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grpo_core.errors import InputError

R = TypeVar("R")

_OFFLINE = (
    "It is not in the local cache of the Hugging Face Hub, and HF_HUB_OFFLINE forbids downloads. Unset "
    "HF_HUB_OFFLINE, or run `hf download` once on a machine that shares the cache, or set a local path."
)


@dataclass(frozen=True)
class HubName:
    """A model repository, or one of its files; `revision` None means the branch ``main``."""

    repo: str
    revision: str | None
    file: str = ""

    def cached(self, file: str | None = None) -> str | None:
        """Return the path of the file in the local cache, None where it is not there; uses no network."""
        import huggingface_hub

        try:
            found = huggingface_hub.try_to_load_from_cache(self.repo, file or self.file, revision=self.revision)
        except ValueError:
            # A name that the Hub does not accept, so the cache never contains it.
            return None
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Source(abc.ABC):
    """The settings that name weights.

    Attributes:
        place: of the setting with the source, for messages; the digest's has ``_sha256`` added.
        source: a path, or a name on the Hub; None where it is not set.
        sha256: the digest that they must have, complete or its first digits.
    """

    place: str
    source: str | None
    sha256: str | None

    def find_problem(self) -> InputError | None:
        """Return what is wrong with the weights, without loading or downloading; None where nothing is.

        What is on the Hub and not in the local cache is no problem unless the Hub is offline.
        """
        try:
            self.find_here()
        except InputError as error:
            return error
        return None

    def path(self) -> str:
        """Return the checked file or folder; what is on the Hub only is downloaded.

        Raises:
            InputError: missing or wrong weights, or a failure of the Hub.
        """
        found = self.find_here()
        if found is None:
            found = self._ask_hub(self._download)
            self._check(found)
        return found

    def find_here(self) -> str | None:
        """Return the checked file or folder; None where it is on the Hub only.

        The local cache comes before the Hub, so that weights do not change during a run when their branch moves on.

        Raises:
            InputError: missing or wrong weights, or weights on the Hub only, which is offline.
        """
        if self.source is None:
            raise self._not_set()
        located = self._locate(self.source)
        found = self._cached(located) if isinstance(located, HubName) else located
        if found is None:
            self._require_online()
        else:
            self._check(found)
        return found

    @property
    def on_hub(self) -> bool:
        """Whether the source is a name on the Hub."""
        return self.source is not None and isinstance(self._locate(self.source), HubName)

    def is_here(self) -> bool:
        """Return whether something is there: in the local cache for a name on the Hub."""
        located = None if self.source is None else self._locate(self.source)
        if isinstance(located, HubName):
            return self._cached(located) is not None
        return located is not None and Path(located).expanduser().exists()

    def hub_bytes(self) -> int | None:
        """Ask the Hub for the size of what :meth:`path` would download; None where it does not say.

        Raises:
            InputError: a failure of the Hub, or it is offline.
        """
        self._require_online()
        return self._ask_hub(self._hub_bytes)

    @abc.abstractmethod
    def digest(self) -> str:
        """Return the sha256 of the weights; they are downloaded unless the local cache has them.

        Raises:
            InputError: as :meth:`path`.
        """

    @abc.abstractmethod
    def _not_set(self) -> InputError:
        """Return the error of a source that is None."""

    @abc.abstractmethod
    def _locate(self, source: str) -> str | HubName:
        """Return what the source names."""

    @abc.abstractmethod
    def _cached(self, name: HubName) -> str | None:
        """Return where the local cache has all of it, if it has."""

    @abc.abstractmethod
    def _download(self, name: HubName) -> str:
        """Download it into the local cache, and return its path there."""

    @abc.abstractmethod
    def _hub_bytes(self, name: HubName) -> int | None:
        """Ask the Hub for the number of bytes that :meth:`_download` downloads."""

    @abc.abstractmethod
    def _check(self, found: str) -> None:
        """Refuse what is missing, incomplete, or of another digest."""

    def _error(self, hint: str) -> InputError:
        return InputError(self.place, self.source, hint)

    def _require_online(self) -> None:
        import huggingface_hub

        if huggingface_hub.is_offline_mode():
            raise self._error(_OFFLINE)

    def _ask_hub(self, request: Callable[[HubName], R]) -> R:
        """Send a request for the source, and turn every failure of the Hub into one message."""
        from huggingface_hub import errors

        located = self._locate(self.source or "")
        assert isinstance(located, HubName)
        try:
            return request(located)
        # HTTPError is the base of all that the Hub's HTTP client raises, a broken connection among it.
        except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:  # type: ignore[attr-defined]
            raise self._error(_hub_hint(error)) from error


def _hub_hint(error: Exception) -> str:
    from huggingface_hub import errors

    hints: dict[type[Exception], str] = {
        errors.GatedRepoError: "Its owners ask for consent: accept the terms on its page, then run `hf auth login`.",
        errors.RepositoryNotFoundError: "There is no such repository. If it is private, run `hf auth login`.",
        errors.RevisionNotFoundError: "The repository has no such revision. Set a branch, a tag or a complete commit.",
        errors.RemoteEntryNotFoundError: "The repository has no such file. Its page on the Hub lists them under Files.",
    }
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    other = f"The Hugging Face Hub did not return it ({reason}). Check the network, or set a local path."
    return next((hint for kind, hint in hints.items() if isinstance(error, kind)), other)
