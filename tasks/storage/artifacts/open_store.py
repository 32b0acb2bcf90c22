"""The store that a configuration describes."""

import functools
from pathlib import Path

from configs.sections import StorageSection
from grpo_core.errors import InputError
from tasks.progress import log
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.read_cache import GIB, ReadCache, default_cache


def open_store(storage: StorageSection, run: str) -> ArtifactStore:
    """A run's store, with the cache that is asked for; nothing is written yet.

    Raises:
        InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
    """
    limit = int(storage.cache_gib * GIB)
    if storage.cache_dir is None:
        return ArtifactStore(storage.root, run, default_cache(limit))
    return ArtifactStore(storage.root, run, ReadCache(Path(storage.cache_dir).expanduser(), limit))


def open_store_elsewhere(storage: StorageSection, run: str) -> ArtifactStore:
    """The store of a run that another process holds, perhaps one of another machine.

    Where the folder for copies cannot be written on this machine, they are kept in the user's cache folder.

    Raises:
        InputError: as for open_store.
    """
    store = open_store(storage, run)
    if storage.cache_dir is None or store.files.cache is None:
        return store
    try:
        store.files.cache.require_usable()
    except InputError as error:
        _tell_once(f"{error} Here they are kept in the user's cache folder.")
        return open_store(storage.model_copy(update={"cache_dir": None}), run)
    return store


def described(store: ArtifactStore) -> StorageSection:
    """The root, and where copies of it are kept, as others find them; the user's cache folder is that of each user."""
    root, cache = store.filesystem.unstrip_protocol(store.root), store.files.cache
    if cache is None:
        return StorageSection(root=root)
    users = default_cache()
    chosen = users is None or users.folder != cache.folder
    folder = str(cache.folder.absolute()) if chosen else None
    return StorageSection(root=root, cache_dir=folder, cache_gib=cache.limit / GIB)


@functools.cache
def _tell_once(line: str) -> None:
    """A process does many stages of a run."""
    log(line)
