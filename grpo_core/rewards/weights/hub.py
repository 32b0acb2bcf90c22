"""Names on the Hugging Face Hub: what the local cache holds of them, and how they come into it.

A file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a branch, a tag
or a commit); in a file's name the revision may also follow the repository, as fsspec spells it
(``hf://owner/repo@revision/path/in/repo``). Without one it is the branch ``main``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from grpo_core.errors import InputError

HUB_PREFIX = "hf://"

_REPO = r"[\w.-]+/[\w.-]+"
_FILE = re.compile(rf"hf://(?P<repo>{_REPO})(@(?P<first>[\w.-]+))?/(?P<file>[^@]+?)(@(?P<last>[\w./-]+))?")
_MODEL = re.compile(rf"(hf://)?(?P<repo>{_REPO})(@(?P<revision>[\w./-]+))?")
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubFile:
    """One file of a model repository; `revision` None means the branch ``main``."""

    repo: str
    file: str
    revision: str | None

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class HubModel:
    """A model repository; `revision` None means the branch ``main``."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def parse_hub_file(place: str, name: str) -> HubFile:
    """A file's name taken apart.

    Raises:
        InputError: it is not of the form ``hf://owner/repo/path/in/repo[@revision]``.
    """
    match = _FILE.fullmatch(name)
    if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
        hint = "Name one file as hf://owner/repo/path/in/repo, with @revision at the end where it matters."
        raise InputError(place, name, hint)
    return HubFile(match["repo"], match["file"], match["first"] or match["last"])


def parse_hub_model(name: str) -> HubModel | None:
    """A model's name taken apart; None where it has not the form ``owner/repo[@revision]``."""
    match = _MODEL.fullmatch(name)
    return None if match is None else HubModel(match["repo"], match["revision"])


def cached_file(name: HubFile) -> str | None:
    """Path of the file in the local cache, None where it is not there; asks nobody."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name.repo, name.file, revision=name.revision)
    except ValueError:
        # A name that the Hub would not take, so that nothing of it was ever kept.
        return None
    return found if isinstance(found, str) else None


def find_hub_problem(place: str, name: str) -> InputError | None:
    """What keeps something that is not in the local cache from being fetched; asks nobody, so it knows only this.

    Args:
        place: of the setting, for the message.
        name: the setting.
    """
    import huggingface_hub

    if not huggingface_hub.is_offline_mode():
        return None
    hint = (
        "It is not in the local cache of the Hugging Face Hub, and HF_HUB_OFFLINE forbids to fetch it. Unset "
        "HF_HUB_OFFLINE, or fetch it once with `hf download` on a machine that shares the cache, or give a local path."
    )
    return InputError(place, name, hint)


def fetch_file(place: str, name: HubFile) -> str:
    """Path of the file in the local cache, downloaded where it was not there.

    Raises:
        InputError: it cannot be had.
    """
    import huggingface_hub

    found = cached_file(name)
    if found is not None:
        return found

    def fetch() -> str:
        return huggingface_hub.hf_hub_download(name.repo, name.file, revision=name.revision)

    return ask_hub(place, str(name), fetch)


def ask_hub(place: str, name: str, ask: Callable[[], _T]) -> _T:
    """What `ask` gives; each way in which the Hub fails to answer becomes one message.

    Raises:
        InputError: there is no such thing, it is not open to this account, or the Hub cannot be reached.
    """
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        hint = "Its owners ask for consent: accept their terms on its page, then log in with `hf auth login`."
        raise InputError(place, name, hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "The Hub shows no such repository. Mind the spelling; for a private one log in with `hf auth login`."
        raise InputError(place, name, hint) from error
    except errors.RevisionNotFoundError as error:
        hint = "The repository has no such revision. Give a branch, a tag or a whole commit."
        raise InputError(place, name, hint) from error
    except errors.RemoteEntryNotFoundError as error:
        hint = "The repository has no such file. Its page on the Hub lists them under Files."
        raise InputError(place, name, hint) from error
    # The Hub's client raises its connection and time-out failures as these as well.
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = f"The Hugging Face Hub did not give it ({reason}). Check the network, or give a local path."
        raise InputError(place, name, hint) from error
