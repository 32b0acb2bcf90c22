"""One weight file: whether it is the right one, and where it is published."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.weights.source import HubName, Source

HUB_PREFIX = "hf://"

_NAME = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")


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
        licence: as its publisher states it; empty where its page on the Hub does.
    """

    file: str
    project: str
    url: str
    hub: str | None = None
    digest: str | None = None
    note: str = ""
    licence: str = ""

    @property
    def sha256_start(self) -> str:
        """First digits of the sha256."""
        return Path(self.file).stem.rsplit("-", 1)[-1] if self.digest is None else self.digest


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
class WeightSource(Source):
    """The settings that name a weight file: a path, or ``hf://owner/repo/file``.

    Attributes:
        published: where the file comes from. Without `sha256`, a file with the published name must have the published
            digest.

    Raises:
        InputError: the source is blank, or a malformed name on the Hub.
    """

    published: PublishedWeights

    def __post_init__(self) -> None:
        if self.source is not None and not self.source.strip():
            other = f", or {self.published.hub}" if self.published.hub else ""
            raise self._error(f"Set the path of {self.published.file}{other}.")
        if self.source is not None:
            self._locate(self.source)

    def resolve(self) -> WeightFile:
        """Return the file with its digest checked; it is downloaded unless it is here."""
        found = self.path()
        return WeightFile(self.place, found, file_sha256(found))

    def digest(self) -> str:
        """Return the sha256 of the file; raises as :meth:`resolve`."""
        return self.resolve().sha256

    def as_published(self, folder: Path) -> "WeightSource":
        """Return the same with the published file where none is set: on the Hub, or else in a folder."""
        return self if self.source else replace(self, source=self.published.hub or str(folder / self.published.file))

    def _hub_bytes(self, name: HubName) -> int | None:
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(name.repo, name.file, revision=name.revision)
        return huggingface_hub.get_hf_file_metadata(url).size

    def _not_set(self) -> InputError:
        return self._error(f"This reward needs weights that its package does not contain. {self._obtaining()}")

    def _locate(self, source: str) -> str | HubName:
        if not source.startswith(HUB_PREFIX):
            return source
        match = _NAME.fullmatch(source)
        if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
            hint = "Name one file as hf://owner/repo/path/in/repo, and add @revision for another branch, tag or commit."
            raise self._error(hint)
        return HubName(match["repo"], match["first"] or match["last"], match["file"])

    def _cached(self, name: HubName) -> str | None:
        return name.cached()

    def _download(self, name: HubName) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_download(name.repo, name.file, revision=name.revision)

    def _check(self, found: str) -> None:
        if not Path(found).expanduser().is_file():
            raise self._error(f"There is no such file. {self._obtaining()}")
        try:
            digest = file_sha256(found)
        except OSError as error:
            hint = f"The file cannot be read ({error.strerror}). Make it readable."
            raise InputError(self.place, found, hint) from error
        known = self.published.sha256_start if Path(found).name == self.published.file else ""
        expected = (self.sha256 or known).lower()
        if not digest.startswith(expected):
            hint = f"The sha256 of {found} is {digest}. Download it again ({self.published.url}), or set its digest."
            raise InputError(f"{self.place}_sha256", expected, hint)

    def _obtaining(self) -> str:
        """Say how to get the file."""
        published, setting = self.published, self.place.rsplit(".", 1)[-1]
        note = f" ({published.note})" if published.note else ""
        local = (
            f"Download {published.file}, published by {published.project} at {published.url}{note}, "
            f"and set `{setting}` in the reward's settings to its path"
        )
        return f"{local}, or to {published.hub}." if published.hub else f"{local}."


@dataclass(frozen=True)
class PackagedFile:
    """A weight file that an installed Python package contains."""

    path: Path

    def find_problem(self) -> None:
        """Return None: the package is installed with it."""

    def digest(self) -> str:
        """Return the sha256 of the file."""
        return file_sha256(str(self.path))
