"""Names on the Hugging Face Hub: the local cache, and downloads into it.

A file is ``hf://owner/repo/path/in/repo``, a model ``owner/repo``. Either may end in ``@revision`` (a branch, a tag
or a commit); in a file's name the revision may also follow the repository, as fsspec writes it
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
class HubName:
    """A model repository, or one of its files; `revision` None means the branch ``main``."""

    repo: str
    revision: str | None
    file: str = ""

    def __str__(self) -> str:
        name = f"{HUB_PREFIX}{self.repo}/{self.file}" if self.file else self.repo
        return name + (f"@{self.revision}" if self.revision else "")


def parse_hub_file(place: str, name: str) -> HubName:
    """Parse the name of a file.

    Raises:
        InputError: it is not of the form ``hf://owner/repo/path/in/repo[@revision]``.
    """
    match = _FILE.fullmatch(name)
    if match is None or (match["first"] and match["last"]) or ".." in match["file"].split("/"):
        hint = "Name one file as hf://owner/repo/path/in/repo, and add @revision for another branch, tag or commit."
        raise InputError(place, name, hint)
    return HubName(match["repo"], match["first"] or match["last"], match["file"])


def parse_hub_model(name: str) -> HubName | None:
    """Parse the name of a model; None where it is not of the form ``owner/repo[@revision]``."""
    match = _MODEL.fullmatch(name)
    return None if match is None else HubName(match["repo"], match["revision"])


def cached_file(name: HubName) -> str | None:
    """Return the path of the file in the local cache, None where it is not there; uses no network."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name.repo, name.file, revision=name.revision)
    except ValueError:
        # A name that the Hub does not accept, so the cache never contains it.
        return None
    return found if isinstance(found, str) else None


def find_hub_problem(place: str, name: str) -> InputError | None:
    """Return why something outside the local cache cannot be downloaded, as far as this is known without the network.

    Args:
        place: of the setting, for the message.
        name: the setting.
    """
    import huggingface_hub

    if not huggingface_hub.is_offline_mode():
        return None
    hint = (
        "It is not in the local cache of the Hugging Face Hub, and HF_HUB_OFFLINE forbids downloads. Unset "
        "HF_HUB_OFFLINE, or run `hf download` once on a machine that shares the cache, or set a local path."
    )
    return InputError(place, name, hint)


def ask_hub(place: str, name: HubName, ask: Callable[[], _T]) -> _T:
    """Call `ask` and turn every failure of the Hub into one message.

    Raises:
        InputError: it does not exist, this account has no access, or the Hub cannot be reached.
    """
    from huggingface_hub import errors

    hints: dict[type[Exception], str] = {
        errors.GatedRepoError: "Its owners ask for consent: accept the terms on its page, then run `hf auth login`.",
        errors.RepositoryNotFoundError: "There is no such repository. If it is private, run `hf auth login`.",
        errors.RevisionNotFoundError: "The repository has no such revision. Set a branch, a tag or a complete commit.",
        errors.RemoteEntryNotFoundError: "The repository has no such file. Its page on the Hub lists them under Files.",
    }
    try:
        return ask()
    # The Hub's client raises its connection and time-out failures as these as well.
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        other = f"The Hugging Face Hub did not return it ({reason}). Check the network, or set a local path."
        hint = next((hint for kind, hint in hints.items() if isinstance(error, kind)), other)
        raise InputError(place, str(name), hint) from error
