"""A run's artifacts, verified whenever they are read; what is damaged, or replaced, moves to `quarantine/`."""

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.implementations.memory import MemoryFileSystem

from grpo_core.errors import InputError
from tasks.process import in_threads, map_in_threads
from tasks.progress import log
from tasks.storage.artifacts.files import GIB, ArtifactFiles, ReadCache, default_cache
from tasks.storage.artifacts.reference import (
    MANIFEST_ENDING,
    ArtifactRef,
    Manifest,
    PrunedArtifactError,
    StaleReferenceError,
    read_manifest,
)
from tasks.storage.artifacts.run_folder import RunFolder
from tasks.storage.files import is_local, load_checked, write_file_atomically
from tasks.storage.roots import is_conflict, translate_remote_errors

if TYPE_CHECKING:
    from prefect.filesystems import WritableFileSystem

    from configs.placement import StorageSection

RUN_FILE = "run.json"
_REMEMBERED = 64  # manifests; a stage reads a few
_READING = threading.Lock()


Read = Callable[[ArtifactRef], Path]
"""Returns an artifact's verified folder on this machine, as `ArtifactStore.local_files` does."""


LINEAGE = "lineage"  # entry of run.json and of tombstones: a digest of what made the run's policies and rollouts
_REPLACED = "another result of the same stage took its place"
_CUT_SHORT = "a file is missing or changed, or its writing was cut short"
# Filesystems that read as fast as a copy of them would.
_WITHOUT_CACHE = {"file", "memory"}


class ArtifactStore(RunFolder):
    """The artifacts of one run, each a folder with a manifest next to it; a folder without a manifest is no artifact.

    `files` reads and verifies the files below the root; `cache` has copies of those that are read from a remote one,
    by default in the user's cache folder.
    """

    def __init__(self, root: str, run: str, cache: ReadCache | None = None) -> None:
        super().__init__(root, run)
        protocol = self.filesystem.protocol
        near = _WITHOUT_CACHE & ({protocol} if isinstance(protocol, str) else set(protocol))
        self.files = ArtifactFiles(self.filesystem, cache or (None if near else default_cache()))
        self._latest: OrderedDict[str, Manifest] = OrderedDict()  # by path, as this process wrote or read them

    def manifest_path(self, place: str) -> str:
        """Return where the manifest of the artifact in this folder of the filesystem is."""
        return f"{place}{MANIFEST_ENDING}"

    def inspect(
        self, place: str, reference: ArtifactRef | None = None, *, only: Iterable[str] | None = None
    ) -> Manifest | str:
        """Return an artifact's manifest, which the reference means, or what is wrong with it or `only` these files."""
        path = self.manifest_path(place)
        name, content = path.rsplit("/", 1)[-1], self._read(path)
        if content is None:
            return f"{name} is missing"
        try:
            manifest = read_manifest(content)
        except (ValueError, TypeError) as error:
            return f"{name} is damaged ({error})"
        if reference is not None and not manifest.matches(reference):
            return f"{name} has sha256 {manifest.sha256[:12]}, not {reference.sha256[:12]}"
        return self.files.damage(place, manifest, only) or manifest

    def manifest_at(self, place: str) -> Manifest | None:
        """Read the manifest of the artifact in this folder of the filesystem; None if it is missing or damaged."""
        found = self.inspect(place, only=())
        return None if isinstance(found, str) else found

    def find(self, folder: str) -> ArtifactRef | None:
        """Return the valid artifact in this folder of the run if there is one; it may be pruned (`pruned_reason`)."""
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.inspect(self.path(folder))
        try:
            return None if isinstance(manifest, str) else manifest.reference(f"{self.run}/{folder}")
        except (ValueError, TypeError):
            return None

    def write_manifest(self, folder: str, manifest: Manifest, scratch: Path, *, create: bool = False) -> bool:
        """Write a manifest in one step under the commit lock; with `create`, False if a bucket has one meanwhile."""
        path = self.manifest_path(self.path(folder))
        self._note(path, manifest)
        if not create or is_local(self.filesystem):
            write_file_atomically(self.filesystem, path, manifest.content, scratch=scratch)
            return True
        try:
            self.filesystem.pipe_file(path, manifest.content, mode="create")
        except OSError as error:
            if not is_conflict(error):
                raise
            return False
        return True

    def is_free(self, folder: str) -> bool:
        """Return whether there is nothing in the place of an artifact of the run."""
        return not self._present(folder)

    def _present(self, folder: str) -> list[str]:
        # The manifest is first: without it the folder is no artifact.
        names = [self.manifest_path(folder), folder]
        # A bucket is asked two things, one after the other, to know that there is nothing of a name, but one to know
        # that there is no folder or that a file has no content.
        local, exists = is_local(self.filesystem), self.filesystem.exists
        looks = [exists, exists] if local else [lambda path: self._read(path) is not None, self.filesystem.isdir]
        found = map_in_threads(lambda look: bool(look[0](self.path(look[1]))), list(zip(looks, names, strict=True)))
        return [name for name, exists in zip(names, found, strict=True) if exists]

    def clear_place(self, folder: str, *, reason: str | None = None) -> None:
        """Move what is in the place of an artifact of the run to `quarantine/`, with the reason if it is known."""
        present = self._present(folder)
        if not present:
            return
        if reason is None:
            reason = _CUT_SHORT if isinstance(self.inspect(self.path(folder)), str) else _REPLACED
        self.quarantine(present, reason=reason)

    @contextlib.contextmanager
    def reading(self, *, without: Sequence[str] = ()) -> Iterator[Read]:
        """Give the function that reads artifacts within the block, as `local_files`; copies are removed at its end.

        Each artifact is read once.
        """
        known: dict[tuple[str, str], Path] = {}
        with contextlib.ExitStack() as stack:
            scratch = None
            if not is_local(self.filesystem):
                scratch = stack.enter_context(self.scratch())

            def read(reference: ArtifactRef) -> Path:
                key = reference.uri, reference.sha256
                if key not in known:
                    folder = None if scratch is None else scratch / reference.uri
                    known[key] = self.local_files(reference, folder, without=without)
                return known[key]

            yield read

    def local_files(self, reference: ArtifactRef, folder: Path | None = None, *, without: Sequence[str] = ()) -> Path:
        """Return the artifact's folder on this machine, every file verified; a remote one is copied to `folder`.

        Files whose names match a pattern of `without` are neither verified nor copied. StaleReferenceError if it is
        missing or changed, after its files are moved to `quarantine/`; PrunedArtifactError if they were deleted on
        purpose.
        """
        # memory:// gives concurrent readers one open file.
        alone = _READING if isinstance(self.filesystem, MemoryFileSystem) else contextlib.nullcontext()
        with alone, translate_remote_errors(self.filesystem, self.root):
            place = self.place_of(reference)
            damage = self._read_files(place, reference, folder, without)
            if damage is None:
                return Path(place) if folder is None or is_local(self.filesystem) else folder
            if reference.run == self.run:
                with self.commit_lock():
                    # Another reader may have moved it away, or another process made it again meanwhile.
                    if isinstance(self.inspect(place, reference), str):
                        self.clear_place(reference.folder, reason=damage)
            raise StaleReferenceError(f"{reference.uri}: {damage}; start the run again and the stage runs again")

    def place_of(self, reference: ArtifactRef) -> str:
        """Return the artifact's folder in the filesystem; another run may have become an earlier run since."""
        place = f"{self.root}/{reference.uri}"
        if reference.run == self.run:
            return place
        earlier = (f"{self.root}/{run}/{reference.folder}" for run in self.earlier_runs(reference.run))
        places = itertools.chain([place], earlier)
        return next((each for each in places if not isinstance(self.inspect(each, reference, only=()), str)), place)

    def _read_files(
        self, place: str, reference: ArtifactRef, folder: Path | None, without: Sequence[str]
    ) -> str | None:
        path = self.manifest_path(place)
        if (known := self._latest.get(path)) is not None and folder is not None and not is_local(self.filesystem):
            # The files of what is most likely still there are looked at while the manifest is read again.
            look = partial(self.files.fetch, place, known, folder, _needed(known, without))
            manifest, damage = in_threads(partial(self.inspect, place, reference, only=()), look)
            assert damage is None or isinstance(damage, str)
            if isinstance(manifest, Manifest) and manifest.content == known.content:
                return damage
        else:
            manifest = self.inspect(place, reference, only=())
        if isinstance(manifest, str):
            return manifest
        self._note(path, manifest)
        if manifest.pruned is not None and not manifest.files:
            said = {name: value for name, value in manifest.pruned.items() if name != LINEAGE}
            deleted = f"Its files were deleted by `{said.get('by', 'grpo prune')}`. Choose one that is kept; or remove"
            hint = f"{deleted} {self.manifest_path(place)} and start the run again, which makes it again."
            raise PrunedArtifactError(reference.uri, said, hint)
        needed = _needed(manifest, without)
        if is_local(self.filesystem):
            return self.files.damage(place, manifest, needed)
        assert folder is not None, "a remote artifact needs a local folder"
        return self.files.fetch(place, manifest, folder, needed)

    def _note(self, path: str, manifest: Manifest) -> None:
        """Remember what a process will probably read next."""
        self._latest[path] = manifest
        self._latest.move_to_end(path)
        while len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)

    def pruned_reason(self, reference: ArtifactRef, *, as_read: bool = False) -> Mapping[str, Any] | None:
        """Return what was deleted from an artifact and why, or None; StaleReferenceError if it is another.

        With `as_read` as this process has just read it, without another look.
        """
        known = self._latest.get(self.manifest_path(f"{self.root}/{reference.uri}")) if as_read else None
        if known is not None and known.matches(reference):
            return known.pruned
        with translate_remote_errors(self.filesystem, self.root):
            manifest = self.inspect(self.place_of(reference), reference, only=())
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        return manifest.pruned


def _needed(manifest: Manifest, without: Sequence[str]) -> list[str]:
    return [name for name in manifest.files if not any(fnmatchcase(name, pattern) for pattern in without)]


def lineage_of(store: RunFolder, folder: str) -> str | None:
    """Return a digest of what made a folder's artifact, for evaluations also of the held-out prompts; or None."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        described = load_checked(store.read_file(RUN_FILE) or b"{}")
        lineage: str = described[LINEAGE]
        return f"{lineage} {described['evaluation']}" if folder.startswith("evaluations/") else lineage
    return None


def open_store(storage: "StorageSection", run: str) -> ArtifactStore:
    """Return a run's store, with the configured cache; InputError as for `open_root`."""
    limit = int(storage.cache_gib * GIB)
    if storage.cache_dir is None:
        return ArtifactStore(storage.root, run, default_cache(limit))
    return ArtifactStore(storage.root, run, ReadCache(Path(storage.cache_dir).expanduser(), limit))


def open_store_elsewhere(storage: "StorageSection", run: str) -> ArtifactStore:
    """Return the store of another process's run; copies go to the user's cache folder if theirs is unusable."""
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
    from configs.placement import StorageSection

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
    """What the stages of a context work with; their processes have no lock and no records, which the run has."""

    store: ArtifactStore  # what they read and write
    require_held: Callable[[], None] | None = None  # refuses to write once the lock of the run is lost
    records: "WritableFileSystem | None" = None  # where Prefect records their results


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
