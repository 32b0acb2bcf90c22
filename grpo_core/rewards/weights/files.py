"""One weight file, on disk or on the Hugging Face Hub: whether it is the right one, and where it is published."""

import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.errors import InputError
from grpo_core.rewards.weights.hub import HUB_PREFIX, HubName, ask_hub, cached_file, find_hub_problem, parse_hub_file


@dataclass(frozen=True)
class PublishedWeights:
    """Where a weight file is published.

    Attributes:
        file: its published name.
        project: who publishes it.
        url: where.
        hub: its name on the Hub (``hf://owner/repo/file``), if it is there.
        digest: first digits of its sha256; by default those at the end of its name (``net-1a2b3c4d.pth``). Empty where
            they are not known.
        note: another place where it may already be, for the message.
    """

    file: str
    project: str
    url: str
    hub: str | None = None
    digest: str | None = None
    note: str = ""

    @property
    def sha256_start(self) -> str:
        """First digits of the sha256."""
        return Path(self.file).stem.rsplit("-", 1)[-1] if self.digest is None else self.digest

    def obtaining(self, setting: str) -> str:
        """Say how to get the file, in a sentence that names the setting."""
        note = f" ({self.note})" if self.note else ""
        local = (
            f"Download {self.file}, published by {self.project} at {self.url}{note}, "
            f"and set `{setting}` in the reward's settings to its path"
        )
        return f"{local}, or to {self.hub}." if self.hub else f"{local}."


@dataclass(frozen=True)
class WeightFile:
    """A file that exists and has the right digest; equal to any other file with the same bytes.

    Attributes:
        place: of the setting that named it, for messages.
        path: on this machine.
        sha256: of its bytes.
    """

    place: str = field(compare=False)
    path: str = field(compare=False)
    sha256: str


@dataclass(frozen=True)
class WeightSource:
    """The settings that name a weight file.

    Attributes:
        place: of the setting with the source, for messages; the digest's has ``_sha256`` added.
        source: a path or ``hf://owner/repo/file``; None where it is not set.
        sha256: the digest that the file must have, complete or its first digits. Without it, a file with the published
            name must have the published digest.
        published: where the file comes from.

    Raises:
        InputError: the source is blank, or a malformed name on the Hub.
    """

    place: str
    source: str | None
    sha256: str | None
    published: PublishedWeights

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            other = f", or {self.published.hub}" if self.published.hub else ""
            raise InputError(self.place, self.source, f"Set the path of {self.published.file}{other}.")
        _ = self._hub_name

    def find_problem(self) -> InputError | None:
        """Return what is wrong with the file, without loading or downloading it; None where nothing is.

        A file on the Hub that is not in the local cache is no problem unless the Hub is offline.
        """
        obtain = self.published.obtaining(self.place.rsplit(".", 1)[-1])
        if self.source is None:
            return InputError(
                self.place, None, f"This reward needs weights that its package does not contain. {obtain}"
            )
        path = self.source if self._hub_name is None else cached_file(self._hub_name)
        if path is None:
            return find_hub_problem(self.place, self.source)
        if not Path(path).expanduser().is_file():
            return InputError(self.place, self.source, f"There is no such file. {obtain}")
        return self._find_digest_problem(path)

    def resolve(self) -> WeightFile:
        """Return the file with its digest checked; a file on the Hub is downloaded unless the local cache has it.

        The cached file counts, so that weights do not change during a run when their branch moves on.

        Raises:
            InputError: the file is missing, cannot be downloaded, or has another digest.
        """
        problem = self.find_problem()
        if problem is not None:
            raise problem
        assert self.source is not None, "find_problem refuses None"
        name, path = self._hub_name, self.source
        if name is not None:
            path = cached_file(name) or ask_hub(self.place, name, lambda: _download(name))
            problem = self._find_digest_problem(path)
            if problem is not None:
                raise problem
        return WeightFile(self.place, path, file_sha256(path))

    def digest(self) -> str:
        """Return the sha256 of the file; raises as :meth:`resolve`."""
        return self.resolve().sha256

    @property
    def _hub_name(self) -> HubName | None:
        on_hub = self.source is not None and self.source.startswith(HUB_PREFIX)
        return parse_hub_file(self.place, self.source) if on_hub else None  # type: ignore[arg-type]

    def _find_digest_problem(self, path: str) -> InputError | None:
        try:
            found = file_sha256(path)
        except OSError as error:
            return InputError(self.place, path, f"The file cannot be read ({error.strerror}). Make it readable.")
        known = self.published.sha256_start if Path(path).name == self.published.file else ""
        expected = (self.sha256 or known).lower()
        if found.startswith(expected):
            return None
        hint = f"The sha256 of {path} is {found}. Download it again ({self.published.url}), or set its digest."
        return InputError(f"{self.place}_sha256", expected, hint)


@dataclass(frozen=True)
class PackagedFile:
    """A weight file that a Python package contains."""

    path: Path

    def find_problem(self) -> None:
        """Return None: the package is installed with it."""

    def digest(self) -> str:
        """Return the sha256 of the file."""
        return file_sha256(str(self.path))


def file_sha256(path: str) -> str:
    """Return the sha256 of a file in hexadecimal; it is read again only when its size or time has changed.

    Raises:
        OSError: the file cannot be read.
    """
    file = Path(path).expanduser().resolve()
    status = file.stat()
    return _file_sha256(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(name: HubName) -> str:
    import huggingface_hub

    return huggingface_hub.hf_hub_download(name.repo, name.file, revision=name.revision)
