"""What a configuration would run, connect to, send, read or write, by its settings' marks; and what a person knows.

A run folder may be somebody else's. What its configuration names is used where the person has trained with it from a
configuration of their own, or has agreed to it. Both are noted in a file of the person's.
"""

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from configs.schema import RunConfig
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import reward_class
from grpo_core.seeds import file_sha256
from grpo_core.user_code.files import follow_code
from grpo_core.user_code.functions import REFERENCE
from grpo_core.uses import Uses, declared_uses, settings_defaults
from tasks.prompts.files import file_ending
from tasks.prompts.formats import ENDINGS

_WITH: Mapping[Uses, frozenset[Uses]] = MappingProxyType(
    {
        Uses.CODE: frozenset({Uses.ARGUMENTS}),
        Uses.COMMAND: frozenset(),
        Uses.ADDRESS: frozenset(),
        Uses.VARIABLE: frozenset({Uses.ADDRESS, Uses.COMMAND}),
        Uses.PLACE: frozenset(),
        Uses.FOLDER: frozenset(),
        Uses.WRITTEN: frozenset(),
    }
)
"""What is asked about, each with the marks of the settings beside it that decide what it does."""

_HASHED_BYTES = 64 * 2**20  # largest file in a command whose content counts: programs and scripts, and no weights


@dataclass(frozen=True)
class Use:
    """A value that a configuration has used."""

    place: str  # key in the configuration
    use: Uses  # what for
    value: str  # what stands there; JSON of what is no text
    details: str  # this setting, and those that decide what it does, as JSON

    @property
    def file(self) -> Path | None:
        """The file with the function; None for one of an installed module, and for what is no code."""
        module = self.value.rpartition(":")[0]
        return Path(module).expanduser().resolve() if self.use is Uses.CODE and module.endswith(".py") else None

    @property
    def digest(self) -> str:
        """sha256 of what is used, with the path of its file and all that this imports from its folder."""
        named = json.loads(self.details)
        if self.file is not None:
            # However the path is written.
            path, name = str(self.file), self.value.rpartition(":")[2]
            named = {key: name if value == self.value else value for key, value in named.items()}
            return _sha256_of([json.dumps(named, sort_keys=True), path, follow_code(self.value).files_digest])
        on_disk = self.use in (Uses.PLACE, Uses.FOLDER, Uses.WRITTEN)
        if on_disk and os.path.exists(place := os.path.expanduser(self.value)):
            named = {key: os.path.realpath(place) for key in named}
        files = _files_of(self.value) if self.use is Uses.COMMAND else []
        return _sha256_of([self.use.name, json.dumps(named, sort_keys=True), *files])

    @property
    def is_missing(self) -> bool:
        """Whether its file or folder is not there, which is reported where it is loaded; a hub's name may be there."""
        if self.use in (Uses.PLACE, Uses.FOLDER):
            is_path = self.use is Uses.FOLDER or self.value.startswith(("/", ".", "~")) or self.value.count("/") > 1
            is_path = is_path or file_ending(self.value) in ENDINGS
            return is_path and "://" not in self.value and not os.path.exists(os.path.expanduser(self.value))
        return self.file is not None and not self.file.is_file()

    @property
    def is_known(self) -> bool:
        """Whether the person has used exactly this, or agreed to it."""
        return self.digest in known_digests()


def _sha256_of(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _files_of(command: str) -> list[str]:
    try:
        words = json.loads(command) if command.startswith("[") else shlex.split(command)
    except ValueError:
        words = []
    paths = [os.path.realpath(os.path.expanduser(str(word))) for word in words]
    files = [path for path in paths if os.path.isfile(path) and os.path.getsize(path) <= _HASHED_BYTES]
    return [part for path in files for part in (path, file_sha256(path))]


def uses_of(settings: BaseModel, place: str = "", *, within: Collection[str] | None = None) -> list[Use]:
    """List what a configuration, or its section at `place`, would use, by the marks of all or these fields."""
    names = [name for name in type(settings).model_fields if within is None or name in within]
    values = {name: getattr(settings, name) for name in names}
    found = list(_marked(type(settings), place, values))
    for name, value in values.items():
        for index, each in enumerate(value if isinstance(value, tuple) else (value,)):
            inner = f"{name}.{index}" if isinstance(value, tuple) else name
            found += uses_of(each, f"{place}.{inner}".lstrip(".")) if isinstance(each, BaseModel) else ()
    if isinstance(settings, RewardSection):
        # One that does not exist is refused when it is built.
        with contextlib.suppress(InputError):
            found += _marked(reward_class(settings.reward), f"{place}.settings", settings.settings)
    return found


def _marked(kind: type, place: str, values: Mapping[str, Any]) -> Iterator[Use]:
    """Yield what is named by the marked fields of settings, where that is not their default."""
    declared, defaults = declared_uses(kind), settings_defaults(kind)
    given = {name: each for name, each in values.items() if name in declared and each not in (None, defaults[name], ())}
    for name, value in given.items():
        use = declared[name]
        if use not in _WITH or (use is Uses.CODE and not REFERENCE.fullmatch(str(value))):
            continue  # a loss of this project has a name, and no module
        details = {other: each for other, each in given.items() if other == name or declared[other] in _WITH[use]}
        text = value if isinstance(value, str) else json.dumps(value)
        yield Use(f"{place}.{name}".lstrip("."), use, text, json.dumps(details, sort_keys=True))


def known_target_folders(config: RunConfig) -> tuple[str, ...]:
    """Return the folders of target images that a run's configuration names, of prompts that the person knows."""
    datasets = [each for _, each in config.datasets]
    return tuple(each.target_folder for each in datasets if all(use.is_known for use in uses_of(each)))


def remember(uses: Iterable[Use]) -> None:
    """Note that the person knows these; where nothing can be written, the next command asks again."""
    file, known = _file(), known_digests()
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


def known_digests() -> frozenset[str]:
    """Return the digests of what the person knows."""
    file = _file()
    with contextlib.suppress(OSError):
        lines = file.read_text(errors="replace").splitlines() if file is not None else ()
        return frozenset(line.partition(" ")[0] for line in lines)
    return frozenset()


def _file() -> Path | None:
    """Return the file in the user's state folder; None for a user without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "grpo" / "trusted_code"
