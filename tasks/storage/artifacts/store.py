"""A run's artifacts, verified whenever they are read, and restored from other places where they are valid.

Damaged files and artifacts that others replace move to `quarantine/`. Restored is what is valid there, in another run,
or in the runs that earlier configurations of a run became: `NAME~1`, `NAME~2`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from tasks.progress import log
from tasks.storage.artifacts.commit import LINEAGE, ArtifactWriter, pruned_error
from tasks.storage.artifacts.files import GIB, ReadCache, default_cache
from tasks.storage.artifacts.reference import ArtifactRef, Manifest, StaleReferenceError
from tasks.storage.artifacts.run_folder import QUARANTINE, RunFolder
from tasks.storage.files import fsync_folder, is_local, load_checked, matching, move_folder
from tasks.storage.roots import translate_remote_errors

if TYPE_CHECKING:
    from configs.sections import StorageSection
    from tasks.storage.prefect_results import StageRecords
    from tasks.storage.run_lock import RunLock

RUN_FILE = "run.json"
_READING = threading.Lock()


Read = Callable[[ArtifactRef], Path]
"""Returns an artifact's verified folder on this machine, as `ArtifactStore.local_files` does."""


class ArtifactStore(ArtifactWriter):
    """Artifacts of one run under a storage root that may be any fsspec URL."""

    @contextlib.contextmanager
    def reading(self, *, without: Sequence[str] = ()) -> Iterator[Read]:
        """Give the function that reads artifacts within the block; at its end, copies of remote ones are removed.

        Args:
            without: patterns of the names of files that are not needed, as for `local_files`.
        """
        with contextlib.ExitStack() as stack:
            scratch = None
            if not is_local(self.filesystem):
                scratch = stack.enter_context(self.scratch())

            def read(reference: ArtifactRef) -> Path:
                folder = None if scratch is None else scratch / reference.uri
                return self.local_files(reference, folder, without=without)

            yield read

    def local_files(self, reference: ArtifactRef, folder: Path | None = None, *, without: Sequence[str] = ()) -> Path:
        """Return the artifact's folder on this machine, every file verified.

        Args:
            reference: an artifact of this root.
            folder: where to put the files of a remote artifact; not used for a local root.
            without: patterns of the names of files that are not needed: they are neither verified nor copied.

        Raises:
            StaleReferenceError: it is missing or changed; its files are moved to `quarantine/` first.
            PrunedArtifactError: its files were deleted on purpose.
            StorageError: a bucket does not return them.
        """
        # Concurrent stages read the same artifact: only one of them may move it away, and memory:// gives all of them
        # one open file.
        with _READING, translate_remote_errors(self.filesystem, self.root):
            place = self._place_of(reference)
            damage = self._read_files(place, reference, folder, without)
            if damage is None:
                return Path(place) if folder is None or is_local(self.filesystem) else folder
            if reference.run == self.run:
                with self.commit_lock():
                    # Another process may have made it again meanwhile.
                    if self.damage(place, reference):
                        self.clear_place(reference.folder, reason=damage)
            raise StaleReferenceError(f"{reference.uri}: {damage}; start the run again and the stage runs again")

    def _place_of(self, reference: ArtifactRef) -> str:
        """Return the artifact's folder in the filesystem; another run may have become an earlier run since."""
        place = f"{self.root}/{reference.uri}"
        if reference.run == self.run or isinstance(self.matching_manifest(place, reference), Manifest):
            return place
        earlier = (f"{self.root}/{run}/{reference.folder}" for run in self.earlier_runs(reference.run))
        return next((each for each in earlier if isinstance(self.matching_manifest(each, reference), Manifest)), place)

    def _read_files(
        self, place: str, reference: ArtifactRef, folder: Path | None, without: Sequence[str]
    ) -> str | None:
        manifest = self.matching_manifest(place, reference)
        if isinstance(manifest, str):
            return manifest
        if manifest.pruned is not None and not manifest.files:
            raise pruned_error(self, place, reference, manifest)
        needed = [name for name in manifest.files if not any(fnmatchcase(name, pattern) for pattern in without)]
        if is_local(self.filesystem):
            return self.files.damage(place, manifest, needed)
        assert folder is not None, "a remote artifact needs a local folder"
        return self.files.fetch(place, manifest, folder, needed)

    def restore_artifact(self, reference: ArtifactRef) -> ArtifactRef:
        """Return the same artifact in its place in this run, copied from elsewhere below the root if need be.

        A pruned artifact counts as present while its tombstone is there. It is restored only from an earlier run of
        this one, if this one has the lineage that it was pruned with: another one may need the deleted files.

        Raises:
            StaleReferenceError: there is no valid copy; damaged files are moved to `quarantine/` first.
            StorageError: a bucket does not answer.
        """
        home = reference.model_copy(update={"uri": f"{self.run}/{reference.folder}"})
        if reference.run != self.run:
            self.copied[reference.folder] = reference.run
        with translate_remote_errors(self.filesystem, self.root):
            damage = self.damage(self.path(home.folder), home)
            if damage is None:
                return home
            for run, place in self._other_places(reference):
                manifest = self.matching_manifest(place, reference)
                if not isinstance(manifest, Manifest) or not self._may_restore(run, manifest, home.folder):
                    continue
                if self.files.damage(place, manifest) is None:
                    self._copy(place, manifest, home.folder, damage)
                    return home
            with self.commit_lock():
                # A valid one belongs to another configuration; the stage that replaces it moves it.
                if self.valid_manifest_at(self.path(home.folder)) is None:
                    self.clear_place(home.folder, reason=damage)
        raise StaleReferenceError(f"{reference.uri}: {damage}")

    def _other_places(self, reference: ArtifactRef) -> Iterator[tuple[str, str]]:
        """Yield where the artifact may be, as a run and a folder in the filesystem."""
        yield reference.run, f"{self.root}/{reference.uri}"
        runs = list(dict.fromkeys([self.run, reference.run]))
        for run in (earlier for name in runs for earlier in self.earlier_runs(name)):
            yield run, f"{self.root}/{run}/{reference.folder}"
        for run in runs:
            for place in reversed(matching(self.filesystem, f"{self.root}/{run}/{QUARANTINE}", "*")):
                yield run, f"{place}/{reference.folder}"

    def _may_restore(self, run: str, manifest: Manifest, folder: str) -> bool:
        if manifest.pruned is None:
            return True
        lineage = manifest.pruned.get(LINEAGE)
        return run in self.earlier_runs() and lineage is not None and lineage == lineage_of(self, folder)

    def _copy(self, source: str, manifest: Manifest, folder: str, damage: str) -> None:
        place = self.path(folder)
        with self.staging() as staged, self.commit_lock():
            self.clear_place(folder, reason=None if self.valid_manifest_at(place) else damage)
            for name, sha256 in manifest.files.items():
                if is_local(self.filesystem):
                    (staged / name).parent.mkdir(parents=True, exist_ok=True)
                    self.filesystem.get_file(f"{source}/{name}", str(staged / name))
                else:
                    self.filesystem.cp_file(f"{source}/{name}", f"{place}/{name}")
                    self.files.note_copy(f"{source}/{name}", f"{place}/{name}", sha256)
            if is_local(self.filesystem):
                fsync_folder(staged)
                move_folder(staged, Path(place))
            self.write_manifest(folder, manifest, staged.parent)

    def pruned_reason(self, reference: ArtifactRef) -> Mapping[str, Any] | None:
        """Return what was deleted from an artifact and why, as given to `delete_files`; None if nothing was.

        Raises:
            StaleReferenceError: the artifact there does not match the reference.
        """
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.matching_manifest(self._place_of(reference), reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        return manifest.pruned


def lineage_of(store: RunFolder, folder: str) -> str | None:
    """Return a digest of what made the artifact in a folder of the run; None if the run's description lacks it.

    Evaluations also depend on the held-out prompts.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError):
        described = load_checked(store.read_file(RUN_FILE) or b"{}")
        lineage: str = described[LINEAGE]
        return f"{lineage} {described['evaluation']}" if folder.startswith("evaluations/") else lineage
    return None


def open_store(storage: "StorageSection", run: str) -> ArtifactStore:
    """Return a run's store, with the configured cache; nothing is written yet.

    Raises:
        InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
    """
    limit = int(storage.cache_gib * GIB)
    if storage.cache_dir is None:
        return ArtifactStore(storage.root, run, default_cache(limit))
    return ArtifactStore(storage.root, run, ReadCache(Path(storage.cache_dir).expanduser(), limit))


def open_store_elsewhere(storage: "StorageSection", run: str) -> ArtifactStore:
    """Return the store of a run that another process has opened, perhaps on another machine.

    If the folder for copies cannot be written on this machine, they are kept in the user's cache folder.

    Raises:
        InputError: as for open_store.
    """
    store = open_store(storage, run)
    if storage.cache_dir is None or store.files.cache is None:
        return store
    try:
        store.files.cache.require_usable()
    except InputError as error:
        _log_once(f"{error} Here they are kept in the user's cache folder.")
        return open_store(storage.model_copy(update={"cache_dir": None}), run)
    return store


def described(store: ArtifactStore) -> "StorageSection":
    """Return the root and its folder for copies for other processes; None stands for each user's cache folder."""
    # It takes seconds to import, and a command that finds a run has no need of it.
    from configs.sections import StorageSection

    root, cache = store.url, store.files.cache
    if cache is None:
        return StorageSection(root=root)
    users = default_cache()
    chosen = users is None or users.folder != cache.folder
    folder = str(cache.folder.absolute()) if chosen else None
    return StorageSection(root=root, cache_dir=folder, cache_gib=cache.limit / GIB)


@functools.cache
def _log_once(line: str) -> None:
    """Log a line once per process, which runs many stages of a run."""
    log(line)


@dataclass(frozen=True)
class StageContext:
    """What the stages of a context work with.

    Attributes:
        store: what they read and write.
        lock: the lock of what they write; None in the processes of a stage, whose caller has it.
        records: where Prefect records their results; None in the same processes.
    """

    store: ArtifactStore
    lock: "RunLock | None" = None
    records: "StageRecords | None" = None


_CURRENT: ContextVar[StageContext] = ContextVar("stage_context")


def use_stage_context(context: StageContext) -> None:
    """Make the stages of the current context work with these."""
    _CURRENT.set(context)


def use_store(store: ArtifactStore) -> None:
    """Make this the store that the stages of the current context read and write, without lock and records."""
    _CURRENT.set(StageContext(store))


def stage_context() -> StageContext:
    """Return what the stages of the current context work with."""
    return _CURRENT.get()


def current_store() -> ArtifactStore:
    """Return the store of the current context."""
    return _CURRENT.get().store
