"""Find a run by name or path; read and write its description, and when and where it was started."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Json, ValidationError

from grpo_core.errors import InputError
from tasks.process import code_version
from tasks.prompts.files import nearest_names
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tasks.storage.links import LinkError
from tasks.storage.roots import translate_remote_errors
from tasks.storage.schemas import SCHEMA_VERSION

CONFIG_FILE, CONFIG_SHA256 = "config.yaml", "config_sha256"
LAST_OF_BEFORE = "c8db4ec"  # the last commit that reads and continues runs of the schema version before this program's
_HINT = "Start the run again with its own command, which writes it again."


def write_description(store: ArtifactStore, described: Mapping[str, Any], config: bytes) -> None:
    """Write both files; a reader between the two writes finds a configuration that does not match."""
    store.write_file(CONFIG_FILE, config)
    store.write_file(RUN_FILE, dump_checked({**described, CONFIG_SHA256: hashlib.sha256(config).hexdigest()}))


class _Identity(BaseModel):
    """What readers take apart of a run's identity."""

    code: dict[str, str] = {}
    inputs: dict[str, dict[str, str]] = {}
    heldout: dict[str, dict[str, str]] = {}
    settings: dict[str, dict[str, Any]] = {}
    scores: list[tuple[Json[dict[str, Any]], str]] = []


class _Described(BaseModel):
    """What readers take apart of run.json; a checksum says that nobody changed it, and not that a run wrote it."""

    identity: _Identity | None = None
    start: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    accepted_code: dict[str, Any] = {}


def read_description(store: ArtifactStore) -> Mapping[str, Any]:
    """Return the content of run.json; empty where there is none, InputError for entries that no run writes."""
    content = store.read_file(RUN_FILE)
    try:
        described = {} if content is None else load_checked(content)
        _Described.model_validate(described)
        return described
    except ValidationError as error:
        entry = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(
            f"{store.run}/{RUN_FILE}, {entry}", error.errors()[0]["input"], f"No run wrote it. {_HINT}"
        ) from error
    except ValueError as error:
        raise InputError(f"{store.run}/{RUN_FILE}", str(error), f"It is damaged. {_HINT}") from error


def read_config_file(store: ArtifactStore) -> bytes:
    """Return the configuration that the run was made with, as YAML; InputError if it is missing or was changed."""
    content = store.read_file(CONFIG_FILE)
    if content is None:
        hint = f"It has no {CONFIG_FILE}, so it is unknown how its rollouts were made; name another run."
        raise InputError("RUN", store.run, hint)
    found = hashlib.sha256(content).hexdigest()
    if read_description(store).get(CONFIG_SHA256, found) != found:
        hint = f"It is not what the run wrote. {_HINT}"
        raise InputError(f"{store.run}/{CONFIG_FILE}", f"sha256 {found[:12]}", hint)
    return content


def require_schema(store: ArtifactStore) -> None:
    """Raise InputError for a run that an older or newer version of this program wrote; nothing is changed."""
    try:
        version = read_description(store).get("schema_version")
    except InputError:
        # A damaged file has no known version; its readers report the damage.
        return
    if isinstance(version, int) and version != SCHEMA_VERSION:
        other = f"commit {LAST_OF_BEFORE}" if version < SCHEMA_VERSION else "the newer commit that wrote it"
        hint = (
            f"This program reads version {SCHEMA_VERSION}, and nothing was changed. Finish the run with {other} "
            "(`git checkout`), or start under a new run name."
        )
        raise InputError(f"{store.run}/{RUN_FILE}", f"schema version {version}", hint)


def find_run(name: str, root: str) -> ArtifactStore:
    """Return the run of this name or path; InputError, with the nearest names, if there is none that can be read."""
    if not name.strip():
        raise InputError("RUN", name, "Name a run, or the path of its folder.")
    found = next((store for store in _candidates(name, root) if _is_folder(store)), None)
    if found is None:
        raise InputError("RUN", name, _known_runs(name, root))
    if not _is_run(found):
        reason = f"The folder {found.path()} is no run: it has neither {RUN_FILE} nor an iteration."
        raise InputError("RUN", name, f"{reason} {_known_runs(name, root)}")
    found.refuse_links()
    require_schema(found)
    return found


def spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers as people write them, `1 to 7, 9`; `none` without numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in found) or "none"


def _is_folder(store: ArtifactStore) -> bool:
    with translate_remote_errors(store.filesystem, store.root):
        return bool(store.filesystem.isdir(store.path()))


def _is_run(store: ArtifactStore) -> bool:
    reader = RunReader(store)
    try:
        return RUN_FILE in reader.names() or bool(reader.iterations())
    except LinkError:
        # Nobody can say without following it; who opens it is refused with the reason.
        return True


def _candidates(name: str, root: str) -> Iterator[ArtifactStore]:
    if "/" not in name and name not in (".", "..", "~"):
        yield _store(root, name, "--root")
    if "://" in name:
        parent, _, last = name.rstrip("/").rpartition("/")
        yield _store(parent, last, "RUN")
    else:
        path = Path(os.path.abspath(Path(name).expanduser()))
        yield _store(str(path.parent), path.name, "RUN")


def _store(root: str, run: str, place: str) -> ArtifactStore:
    try:
        return ArtifactStore(root, run)
    except InputError as error:
        # The error's value is the root without the credentials that the URL may contain.
        raise InputError(place, error.value, error.hint) from error


def runs_below(root: str, place: str = "--root") -> list[ArtifactStore] | None:
    """Return the runs under a storage root, which the option `place` names; None where there is no such folder."""
    store = _store(root, "", place)
    with translate_remote_errors(store.filesystem, store.root):
        if not store.filesystem.isdir(store.root):
            return None
        stores = [_store(root, name, place) for name in RunReader(store).names() if not name.startswith(".")]
        return [each for each in stores if _is_run(each)]


def _known_runs(name: str, root: str) -> str:
    found = runs_below(root)
    if found is None:
        return f"There is no folder {root} either; name the storage root with --root, or the path of the run's folder."
    runs = [each.run for each in found]
    if not runs:
        return f"{root} has no runs; name the storage root with --root, or the path of the run's folder."
    nearest = nearest_names(name.rstrip("/").rsplit("/", 1)[-1], runs)
    return f"The nearest of the {len(runs)} in {root}: {nearest}; `grpo list` shows all."


STARTS_FILE = "starts.jsonl"


class RunStart(BaseModel):
    """One start of a run."""

    model_config = ConfigDict(frozen=True)

    at: datetime
    host: str  # name of the machine
    code: str | None  # commit of the checkout, with `-dirty` where files were changed; None outside a checkout
    processor: str | None = None  # what computed, as `describe_processor` says; None of older starts
    versions: Mapping[str, str] = {}  # of Python and the libraries

    def __str__(self) -> str:
        code = f", code {self.code}" if self.code is not None else ""
        return f"{self.at:%Y-%m-%d %H:%M} UTC on {self.host}{code}"


def record_start(store: ArtifactStore, processor: str, versions: Mapping[str, str]) -> None:
    """Add a line about this moment, machine and code."""
    start = RunStart(
        at=datetime.now(UTC).replace(microsecond=0),
        host=socket.gethostname(),
        code=code_version(),
        processor=processor,
        versions=versions,
    )
    store.write_file(STARTS_FILE, (store.read_file(STARTS_FILE) or b"") + start.model_dump_json().encode() + b"\n")


def read_starts(reader: RunReader) -> tuple[RunStart, ...]:
    """Read the starts in order; a damaged line is reported and left out."""
    starts = []
    for line in (reader.read_bytes(STARTS_FILE) or b"").splitlines():
        try:
            starts.append(RunStart.model_validate(json.loads(line)))
        except (ValueError, ValidationError, RecursionError):
            reader.report_damage(STARTS_FILE, "a line of it is damaged")
    return tuple(starts)
