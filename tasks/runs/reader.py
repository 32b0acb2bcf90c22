"""Read and verify a run's folder without changing it; damage is reported and left where it is."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from grpo_core.errors import InputError
from tasks.runs import layout
from tasks.storage.artifacts.commit import removed_by
from tasks.storage.artifacts.reference import MANIFEST_ENDING, ArtifactRef, Manifest, StaleReferenceError, read_manifest
from tasks.storage.artifacts.run_folder import QUARANTINE, REASON_FILE
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import is_local, read_bounded
from tasks.storage.schemas import SCHEMA_VERSION

T = TypeVar("T")

VERIFIED_BYTES = 512 * 2**20  # how many bytes of artifacts that are not shown are verified: about a second of sha256


@dataclass(frozen=True)
class Damage:
    """A file, or the folder of an artifact, within the run, and how it differs from what was written."""

    place: str
    reason: str


@dataclass(frozen=True)
class MovedFiles:
    """What a start of the run moved to a folder of `quarantine/`; paths are within the run."""

    place: str
    reason: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact whose manifest is valid and whose files exist."""

    reference: ArtifactRef
    manifest: Manifest


class Memory:
    """What need not be read again when a run is, because verified files never change; `verified` names artifacts."""

    def __init__(self) -> None:
        self.verified: set[tuple[str, str]] = set()
        self._known: dict[Hashable, Any] = {}
        self._used: set[Hashable] = set()

    def recall(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return what was read under this key, or read it now."""
        self._used.add(key)
        if key not in self._known:
            self._known[key] = read()
        found: T = self._known[key]
        return found

    def forget_unused(self) -> None:
        """Keep only what was recalled since the last call."""
        self._known = {key: value for key, value in self._known.items() if key in self._used}
        self._used = set()


class RunReader:
    """Reads one run and collects the damage that it finds. Unlike the store it moves nothing."""

    def __init__(self, store: ArtifactStore, memory: Memory | None = None) -> None:
        self.store = store
        self.memory = memory or Memory()  # what later readers of the run need not read again
        self.damages: list[Damage] = []  # each file once
        self.pruned: dict[str, Mapping[str, Any]] = {}  # what `grpo prune` removed from artifacts that were found
        self.unverified = 0  # number of artifacts that were too large to verify
        # Verifying a remote artifact means fetching it, so only shown ones are verified.
        self._budget = VERIFIED_BYTES if is_local(store.filesystem) else 0
        self._sizes: dict[str, int] = {}  # of the run's files, of a bucket that was listed
        self._folders: dict[str, set[str]] | None = None  # names in each folder, of a bucket that was listed

    def list_files(self) -> None:
        """List a bucket's files of the run at once; what follows asks neither for names, nor for what is there."""
        filesystem = self.store.filesystem
        if is_local(filesystem):
            return
        root = str(filesystem._strip_protocol(self.store.path()))
        found = filesystem.find(root, detail=True)
        self._sizes = {path.removeprefix(root).strip("/"): int(each["size"] or 0) for path, each in found.items()}
        self._folders = {}
        for path in self._sizes:
            *folders, _ = parts = path.split("/")
            for depth in range(len(folders) + 1):
                self._folders.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def names(self, folder: str = "") -> list[str]:
        """List the sorted names in a folder of the run; empty where there is no such folder."""
        if self._folders is not None:
            return sorted(self._folders.get(folder, ()))
        try:
            found = self.store.filesystem.ls(self.store.path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def artifact_names(self, folder: str) -> list[str]:
        """List the sorted names of the artifacts in a folder of the run."""
        found = self.names(folder)
        return [name.removesuffix(MANIFEST_ENDING) for name in found if name.endswith(MANIFEST_ENDING)]

    def rescorings(self) -> list[str]:
        """List the sorted names of the rescorings; one that was refused before it stored anything has only a lock."""
        names = self.names(layout.RESCORED)
        return [
            name for name in names if any(not each.startswith(".") for each in self.names(f"{layout.RESCORED}/{name}"))
        ]

    def iterations(self) -> list[int]:
        """List the iterations that have a folder, in order."""
        return sorted(number for name in self.names() if (number := layout.parse_iteration(name)) is not None)

    def policies(self) -> list[int]:
        """List the policy versions that have a manifest, pruned ones included, in order."""
        return sorted(int(name) for name in self.artifact_names(layout.POLICIES) if name.isdigit())

    def evaluations(self, folder: str = layout.EVALUATIONS) -> list[int]:
        """List the policy versions that have an evaluation in this folder, in order."""
        return sorted(int(name) for name in self.names(folder) if name.isdigit())

    def has_evaluated(self, version: int, config: Mapping[str, Any]) -> bool:
        """Return whether a version has the evaluation that the configuration's last one gets; nothing is verified."""

        def given(section: str, name: str) -> Any:
            found = config.get(section)
            return found.get(name) if isinstance(found, Mapping) else None

        if not (given("evaluate", "prompts") or given("evaluate", "datasets")):
            return True
        folder, guardrails = layout.evaluation_folder(version), given("guardrails", "rewards")
        scored = len(self.artifact_names(f"{folder}/{layout.GUARDRAILS}"))
        asked = len(guardrails) if isinstance(guardrails, list) else 0
        return layout.ADVANTAGES in self.artifact_names(folder) and scored >= asked

    def rounds(self, folder: str) -> list[str]:
        """List the folders of an iteration's sampling rounds in order; that of the first is the iteration's folder."""
        return [folder, *(f"{folder}/{name}" for name in self.names(folder) if layout.is_later_round(name))]

    def scored_rounds(self, folder: str) -> list[str]:
        """List the folders of the sampling rounds that the last advantages cover; empty without advantages."""
        folders = self.rounds(folder)
        scored = [index for index, each in enumerate(folders) if layout.ADVANTAGES in self.artifact_names(each)]
        return folders[: scored[-1] + 1] if scored else []

    def read_bytes(self, name: str) -> bytes | None:
        """Read a small file of the run; None where there is none."""
        try:
            return read_bounded(self.store.filesystem, self.store.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.report_damage(name, f"it cannot be read ({error})")
            return None

    def read_json(self, name: str) -> Mapping[str, Any]:
        """Read an object of JSON; empty, and reported, where it is missing or damaged."""
        content = self.read_bytes(name)
        if content is None:
            self.report_damage(name, "it is missing")
            return {}
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            self.report_damage(name, "it is not JSON")
            return {}
        return values if isinstance(values, Mapping) else {}

    def moved_files(self) -> list[MovedFiles]:
        """Return what was moved to `quarantine/`, in the order of its folders' names."""
        found = []
        for name in self.names(QUARANTINE):
            note = self.read_json(f"{QUARANTINE}/{name}/{REASON_FILE}")
            paths = note.get("paths")
            moved = tuple(str(path) for path in paths) if isinstance(paths, list) else ()
            found.append(MovedFiles(f"{QUARANTINE}/{name}", str(note.get("reason", "no reason is written")), moved))
        return found

    def report_damage(self, place: str, reason: str) -> None:
        """Add a damage to the list."""
        damage = Damage(place, reason)
        if damage not in self.damages:
            self.damages.append(damage)

    def find(self, folder: str) -> StoredArtifact | None:
        """Return the artifact in this folder if its manifest is valid and every file that it names exists."""
        name = f"{folder}{MANIFEST_ENDING}"
        content = self.read_bytes(name)
        if content is None:
            return None
        try:
            manifest = read_manifest(content)
            reference = manifest.reference(f"{self.store.run}/{folder}")
        except (ValueError, TypeError) as error:
            self.report_damage(name, f"it is not a manifest, or was changed ({type(error).__name__})")
            return None
        if reference.schema_version != SCHEMA_VERSION:
            reason = f"schema version {reference.schema_version}; this program reads {SCHEMA_VERSION}"
            self.report_damage(folder, reason)
            return None
        if manifest.pruned is not None:
            self.pruned[folder] = manifest.pruned
        places = [f"{folder}/{file}" for file in manifest.files]
        # What was written since the files were listed is asked for.
        unseen = [place for place in places if place not in self._sizes]
        missing = [place for place in unseen if not self.store.filesystem.exists(self.store.path(place))]
        for place in missing:
            self.report_damage(place, "it is missing")
        return None if missing else StoredArtifact(reference, manifest)

    def verify(self, artifact: StoredArtifact, only: Iterable[str] | None = None) -> bool:
        """Return whether the files, or `only` these, are as the manifest states; states are left to a start."""
        folder, manifest, valid = artifact.reference.folder, artifact.manifest, True
        for name in _shown(manifest.files) if only is None else only:
            try:
                reason = self.store.files.damage_of(self.store.path(folder), manifest, name)
            except OSError as error:
                reason = f"cannot be read ({error})"
            if reason is not None:
                self.report_damage(f"{folder}/{name}", f"it {reason}")
                valid = False
        if valid and only is None:
            self.memory.verified.add((folder, artifact.reference.sha256))
        return valid

    def valid_stages(self, stages: Mapping[str, Iterable[ArtifactRef]]) -> dict[str, tuple[ArtifactRef, ...]]:
        """Return the artifacts by stage whose files verify, also beyond the budget; stages without any are left out."""
        valid = {stage: tuple(part for part in parts if self._is_valid(part)) for stage, parts in stages.items()}
        return {stage: parts for stage, parts in valid.items() if parts}

    def _is_valid(self, reference: ArtifactRef) -> bool:
        if (reference.folder, reference.sha256) in self.memory.verified:
            return True
        found = self.find(reference.folder)
        return found is not None and found.reference.sha256 == reference.sha256 and self.verify(found)

    def verify_within_budget(self, artifact: StoredArtifact) -> bool:
        """Verify while the budget lasts; an artifact beyond it counts as valid and as unverified."""
        folder = artifact.reference.folder
        if (folder, artifact.reference.sha256) in self.memory.verified:
            return True
        places = [f"{folder}/{name}" for name in _shown(artifact.manifest.files)]
        size = sum(self._sizes.get(each) or self.store.filesystem.size(self.store.path(each)) or 0 for each in places)
        if size > self._budget:
            self.unverified += 1
            return True
        self._budget -= size
        return self.verify(artifact)

    def local_folder(self, reference: ArtifactRef, fetched: Path) -> Path:
        """Return the folder of an artifact, copied here without states; StaleReferenceError if it has changed."""
        place, target = self.store.path(reference.folder), fetched / reference.folder
        if is_local(self.store.filesystem):
            return Path(place)
        found: Manifest | str | None = self.store.inspect(place, reference, only=())
        if isinstance(found, Manifest):
            found = self.store.files.fetch(place, found, target, _shown(found.files))
        if found is not None:
            raise StaleReferenceError(f"{reference.uri}: {found}")
        return target


def _shown(names: Iterable[str]) -> list[str]:
    """Return the names of an artifact's files except those of states, which only an update reads."""
    return [name for name in names if not fnmatchcase(name, layout.STATES)]


def refuse_lost(
    store: ArtifactStore, rollouts: ArtifactRef, folder: str, needed: str, *, as_read: bool = False
) -> None:
    """Raise InputError if a folder's artifact is in quarantine and the part of rollouts for it was pruned.

    With `as_read` this process has just read the rollouts.
    """
    pruned = store.pruned_reason(rollouts, as_read=as_read)
    if pruned is None or needed not in removed_by(pruned):
        return
    names = {folder, store.manifest_path(folder)}
    found = [each for each in RunReader(store).moved_files() if not names.isdisjoint(each.paths)]
    if not found:
        return
    last = found[-1]
    hint = (
        f"It is in {store.path(last.place)} ({last.reason}) and cannot be computed again: the {needed} of "
        f"{rollouts.uri} were removed by `{pruned.get('by', 'grpo prune')}` on {pruned.get('on', 'an earlier day')}. "
        f"Put {store.path(folder)} and {store.manifest_path(store.path(folder))} back from a copy and start again, or "
        "start under another --run name, which starts from the beginning. Other iterations are untouched."
    )
    raise InputError(f"{store.run}/{folder}", "damaged", hint)
