"""Downloads of published weights: what a reward needs, how large it is, and the file where its settings expect it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.model_reward import ModelReward
from grpo_core.rewards.reward import Reward
from grpo_core.rewards.weights.files import WeightSource
from grpo_core.rewards.weights.models import ModelSource

Advance = Callable[[int], None]
"""Called with the number of bytes that have arrived since the last call."""

_SECONDS = 60.0


@dataclass(frozen=True)
class Download:
    """Published weights of a reward.

    Attributes:
        reward: name of the reward.
        weights: the reward's settings that name them, with their place: a file here, or a name on the Hub.
        url: where a file that is not on the Hub comes from; None for the Hub.
        licence: as their publisher states it.
        sha256: first digits that are checked; None where the Hub's own digest is.
    """

    reward: str
    weights: WeightSource | ModelSource
    url: str | None
    licence: str
    sha256: str | None

    @property
    def setting(self) -> str:
        """The reward's setting that names them."""
        return self.weights.place.rpartition(".")[2]

    @property
    def present(self) -> bool:
        """Whether they are on this machine."""
        return self.weights.is_here()

    def size(self) -> int | None:
        """Ask the server for the number of bytes; None where it does not say.

        Raises:
            InputError: there is no answer.
        """
        if self.url is None:
            return self.weights.hub_bytes()
        import httpx

        with self._one_message():
            answer = httpx.head(self.url, follow_redirects=True, timeout=_SECONDS).raise_for_status()
            length = answer.headers.get("Content-Length", "")
            return int(length) if length.isdigit() else None

    def run(self, advance: Advance = lambda count: None) -> str:
        """Download them and return their path; a download that was interrupted continues where it ended.

        Args:
            advance: for a file that is not on the Hub, whose library shows its own progress.

        Raises:
            InputError: no answer, another digest than the published one, or a folder that cannot be written.
        """
        if self.url is not None and not self.present:
            self._download(self.url, Path(self.weights.source or "").expanduser(), advance)
        return self.weights.path()

    def _download(self, url: str, target: Path, advance: Advance) -> None:
        part = target.with_name(f"{target.name}.part")
        with self._one_message():
            target.parent.mkdir(parents=True, exist_ok=True)
            _continue_download(url, part, advance)
            found = file_sha256(str(part))
            if found.startswith((self.sha256 or "").lower()):
                os.replace(part, target)
                return
            part.unlink()
        hint = f"The sha256 of what {url} returned is {found}. It was deleted; try again, or get the file elsewhere."
        raise InputError(f"{self.weights.place}_sha256", self.sha256, hint)

    @contextmanager
    def _one_message(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.HTTPError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            hint = f"It could not be downloaded ({reason}). Check the network and run the command again: it continues."
            raise InputError(self.weights.place, self.url, hint) from error


def downloads_of(reward: Reward, folder: Path) -> list[Download]:
    """List the weights that a reward reads, from where its settings say, or else as they are published.

    Args:
        folder: where files go that are not on the Hub and that the settings do not name.

    Raises:
        InputError: a setting names a file that is missing and not published, or has another digest.
    """
    if not isinstance(reward, ModelReward):
        return []
    sources = reward.weight_sources().values()
    return [_download_of(reward.name, each, folder) for each in sources if isinstance(each, WeightSource | ModelSource)]


def _download_of(reward: str, weights: WeightSource | ModelSource, folder: Path) -> Download:
    weights = weights.as_published(folder)
    if isinstance(weights, ModelSource):
        if not weights.on_hub:
            weights.find_here()
        return Download(reward, weights, None, "", weights.sha256)
    published, source = weights.published, weights.source or ""
    elsewhere = published.hub is None and published.sha256_start and Path(source).name == published.file
    if not weights.on_hub and (weights.is_here() or not elsewhere):
        # Right or wrong, the file is the user's.
        weights.find_here()
    url = published.url if published.hub is None and not weights.on_hub else None
    return Download(reward, weights, url, published.licence, weights.sha256 or published.sha256_start)


def _continue_download(url: str, part: Path, advance: Advance) -> None:
    """Append the rest of a file to what is here of it; a server that sends all of it again replaces it."""
    import httpx

    begun = part.stat().st_size if part.exists() else 0
    # Compressed on the way, a part would have another size than the rest is asked for.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={begun}-"} if begun else {})}
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=_SECONDS) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            # It ended between the last byte and the check.
            return
        answer.raise_for_status()
        continued = answer.status_code == httpx.codes.PARTIAL_CONTENT
        advance(begun if continued else 0)
        with part.open("ab" if continued else "wb") as file:
            for chunk in answer.iter_bytes():
                file.write(chunk)
                advance(len(chunk))
