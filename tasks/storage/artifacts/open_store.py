"""Open the store that a configuration describes."""

import functools
from pathlib import Path

from configs.sections import StorageSection
from grpo_core.errors import InputError
from tasks.progress import log
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.read_cache import GIB, ReadCache, default_cache


def open_store(storage: StorageSection, run: str) -> ArtifactStore:
    """Return a run's store, with the configured cache; nothing is written yet.

    Raises:
        InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
    """
    limit = int(storage.cache_gib * GIB)
    if storage.cache_dir is None:
        return ArtifactStore(storage.root, run, default_cache(limit))
    return ArtifactStore(storage.root, run, ReadCache(Path(storage.cache_dir).expanduser(), limit))


def open_store_elsewhere(storage: StorageSection, run: str) -> ArtifactStore:
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


def described(store: ArtifactStore) -> StorageSection:
    """Return the root and its folder for copies for other processes; None stands for each user's cache folder."""
    root, cache = store.filesystem.unstrip_protocol(store.root), store.files.cache
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
