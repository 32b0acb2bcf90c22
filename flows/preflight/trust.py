"""Code and tokens that a stored run's configuration would use: only those that this person knows, or agrees to.

A run folder may be somebody else's. Its functions, and the variables whose tokens its services would get, are used
where the person has trained with them from a configuration of their own, or says so with `--trust-code`. Both are noted
in a file of the person's.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from configs.training import RewardSection, UpdateSection
from grpo_core.errors import InputError, raise_all
from grpo_core.losses.settings import LOSSES
from grpo_core.user_code import follow_code
from tasks.runs.lookup import CONFIG_FILE
from tasks.runs.stored import stored_config
from tasks.storage.artifacts.store import ArtifactStore

_FUNCTION, _TOKEN = "function", "token_env"
_CALLED_WITH = (_FUNCTION, "arguments", "factory")


@dataclass(frozen=True)
class Use:
    """A function that a configuration has called, or a token that it has sent, and with what.

    Attributes:
        place: key in the configuration.
        value: what stands there.
        details: settings that decide what it does, as JSON.
    """

    place: str
    value: str
    details: str

    @property
    def file(self) -> Path | None:
        """The file with the function; None for one of an installed module, and for a token."""
        module = self.value.rpartition(":")[0]
        return Path(module).expanduser().resolve() if module.endswith(".py") else None

    @property
    def digest(self) -> str:
        """sha256 of what is used, with the path of its file and the code of all that this imports from its folder."""
        if self.file is None:
            return hashlib.sha256(json.dumps([self.details]).encode()).hexdigest()
        # However the path is written.
        path, name = str(self.file), self.value.rpartition(":")[2]
        named = json.loads(self.details).items()
        details = json.dumps({key: name if value == self.value else value for key, value in named}, sort_keys=True)
        return hashlib.sha256(json.dumps([details, path, follow_code(self.value).files_digest]).encode()).hexdigest()

    @property
    def is_missing(self) -> bool:
        """Whether there is no such file, which is reported where it is loaded."""
        return self.file is not None and not self.file.is_file()


def uses_of(config: RunConfig, *, trains: bool = True) -> list[Use]:
    """List what a configuration would run or send, with its losses where a policy is trained; nothing is loaded."""
    uses = uses_of_rewards("rewards", config.rewards)
    uses += uses_of_rewards("guardrails.rewards", config.guardrails.rewards)
    for stream, update in config.updates.items() if trains else ():
        if isinstance(update, UpdateSection) and update.loss not in LOSSES:
            uses.append(Use(f"{config.update_path(stream)}.loss", update.loss, json.dumps({"loss": update.loss})))
    return uses


def uses_of_rewards(place: str, rewards: Sequence[RewardSection]) -> list[Use]:
    """List what rewards would run or send, in the section at `place`."""
    uses = []
    for index, section in enumerate(rewards):
        named: Mapping[str, Any] = section.settings
        for key, deciding in ((_FUNCTION, _CALLED_WITH), (_TOKEN, (_TOKEN, "url"))):
            if isinstance(value := named.get(key), str):
                details = {name: named[name] for name in deciding if named.get(name) is not None}
                uses.append(Use(f"{place}.{index}.settings.{key}", value, json.dumps(details, sort_keys=True)))
    return uses


def trusted_config(
    store: ArtifactStore, overrides: Sequence[str] = (), *, trust: bool, trains: bool = False
) -> RunConfig:
    """Return a run's configuration with changes, if the person trusts what the run itself names.

    Also what the changes replace: its results are compared with the stored ones.

    Args:
        overrides: as for stored_config; what they name is the person's own.
        trust: whether the person agrees to what is not known, which is then remembered.
        trains: whether a policy is trained, with the losses of the configuration.

    Raises:
        InputError: with an entry for each function and token that is not known; or as stored_config.
    """
    own = stored_config(store)
    require_trust(uses_of(own, trains=trains), f"{store.run}/{CONFIG_FILE}", trust=trust)
    return stored_config(store, overrides) if overrides else own


def require_trust(uses: Iterable[Use], named_by: str, *, trust: bool) -> None:
    """Refuse what is not known, unless the person trusts it.

    Args:
        named_by: the file of the run that names it.

    Raises:
        InputError: with an entry for each.
    """
    known = _known()
    new = [use for use in uses if not use.is_missing and use.digest not in known]
    if trust:
        remember(new)
    else:
        raise_all(_refused(use, named_by) for use in new)


def _refused(use: Use, named_by: str) -> InputError:
    named: dict[str, Any] = json.loads(use.details)
    if _TOKEN in named:
        done = f"The content of this variable would be sent to {named.get('url')}"
    else:
        arguments = f" with {json.dumps(named['arguments'])}" if "arguments" in named else ""
        done = f"This would run {use.file or use.value}{arguments}"
    hint = (
        f"{done}, and you have not trained with exactly that on this machine. If the run is somebody else's, read what "
        "it does first; --trust-code (in Python trust_code=True) agrees to it and remembers it."
    )
    return InputError(f"{named_by}, {use.place}", use.value, hint)


def remember(uses: Iterable[Use]) -> None:
    """Note that the person knows these; where nothing can be written, the next command asks again."""
    file, known = _file(), _known()
    lines = {use.digest: f"{use.digest} {json.dumps(use.value)}\n" for use in uses if not use.is_missing}
    new = "".join(line for digest, line in lines.items() if digest not in known)
    if file is None or not new:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One write: several processes may add to it.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "wb", buffering=0) as stream:
            stream.write(new.encode())


def _known() -> frozenset[str]:
    return frozenset(_lines())


def _lines() -> Iterator[str]:
    file = _file()
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines() if file is not None else ():
            yield line.partition(" ")[0]


def _file() -> Path | None:
    """Return the file in the user's state folder; None for a user without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "grpo" / "trusted_code"
