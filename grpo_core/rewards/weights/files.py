"""One weight file, on disk or on the Hugging Face Hub: is the right one there, and where is it published."""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import InputError
from grpo_core.rewards.weights.hub import (
    HUB_PREFIX,
    cached_file,
    fetch_file,
    find_hub_problem,
    parse_hub_file,
)


@dataclass(frozen=True)
class PublishedWeights:
    """Where a weight file can be had.

    Attributes:
        file: its name as published.
        project: who publishes it.
        url: from where.
        hub: its name on the Hub (``hf://owner/repo/file``), where it has one.
        digest: first digits of its sha256; by default those that its name ends with (``net-1a2b3c4d.pth``). Empty
            where they are not known.
        note: where else it may lie already, for the message.
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
        """How to come by the file, as a sentence that names the setting."""
        note = f" ({self.note})" if self.note else ""
        local = (
            f"Download {self.file}, published by {self.project} at {self.url}{note}, "
            f"and set `{setting}` in the reward's settings to its path"
        )
        return f"{local}, or to {self.hub}." if self.hub else f"{local}."


@dataclass(frozen=True)
class WeightFile:
    """A file that is there and has the right digest.

    Attributes:
        path: where it lies on this machine.
        sha256: of its bytes.
    """

    path: str
    sha256: str


def check_digest_setting(place: str, value: object) -> None:
    """Refuse what is neither None nor a sha256, whole or its first 8 digits or more.

    Raises:
        InputError: it is not.
    """
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{8,64}", value)):
        raise InputError(place, value, "Set the file's sha256: 64 hexadecimal digits, or at least the first 8.")


def check_source_setting(place: str, value: object, published: PublishedWeights) -> None:
    """Refuse what is neither None, nor a path, nor a well-formed name on the Hub.

    Raises:
        InputError: it is not.
    """
    if value is None:
        return
    if not isinstance(value, str) or not value.strip():
        other = f", or {published.hub}" if published.hub else ""
        raise InputError(place, value, f"Set the path of {published.file}{other}.")
    if value.startswith(HUB_PREFIX):
        parse_hub_file(place, value)


def find_weights_problem(
    place: str, source: str | None, sha256: str | None, published: PublishedWeights
) -> InputError | None:
    """What is wrong with a weight file, without loading or downloading it; None where nothing is.

    A file of the Hub that is not in the local cache is no problem as long as the Hub may be asked.

    Args:
        place: of the setting that holds the source, for messages; the digest's is the same with ``_sha256`` added.
        source: the setting, a path or ``hf://owner/repo/file``; None where it is not set.
        sha256: the digest that the file must have, whole or its first digits. Without it, a file with the published
            name must have the digest that is known of it.
        published: where the file comes from.
    """
    obtain = published.obtaining(place.rsplit(".", 1)[-1])
    if source is None:
        return InputError(place, None, f"This reward needs weights that its package does not hold. {obtain}")
    if source.startswith(HUB_PREFIX):
        name = parse_hub_file(place, source)
        path = cached_file(name)
        if path is None:
            return find_hub_problem(place, source)
    else:
        path = source
        if not Path(path).expanduser().is_file():
            return InputError(place, source, f"There is no such file. {obtain}")
    return _find_digest_problem(place, path, sha256, published)


def _find_digest_problem(place: str, path: str, sha256: str | None, published: PublishedWeights) -> InputError | None:
    try:
        found = file_sha256(path)
    except OSError as error:
        return InputError(place, path, f"The file cannot be read ({error.strerror}). Make it readable.")
    known = published.sha256_start if Path(path).name == published.file else ""
    expected = (sha256 or known).lower()
    if found.startswith(expected):
        return None
    hint = f"The sha256 of {path} is {found}. Fetch the file again ({published.url}), or set its own digest."
    return InputError(f"{place}_sha256", expected, hint)


def resolve_weights(place: str, source: str | None, sha256: str | None, published: PublishedWeights) -> WeightFile:
    """The file itself, its digest checked; a file of the Hub is downloaded unless the local cache holds it.

    What the cache holds is taken as it is, so that the weights do not change under a run when their branch moves on.

    Args:
        place: see :func:`find_weights_problem`, as for the others.
        source: a path or ``hf://owner/repo/file``.
        sha256: the digest that the file must have.
        published: where the file comes from.

    Raises:
        InputError: the file is missing, cannot be had, or is another one.
    """
    problem = find_weights_problem(place, source, sha256, published)
    if problem is not None:
        raise problem
    assert source is not None, "what is not set is a problem"
    path = source
    if source.startswith(HUB_PREFIX):
        path = fetch_file(place, parse_hub_file(place, source))
        problem = _find_digest_problem(place, path, sha256, published)
        if problem is not None:
            raise problem
    return WeightFile(path, file_sha256(path))


def file_sha256(path: str) -> str:
    """sha256 of the file's bytes in hexadecimal; read again only when its size or time has changed.

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
