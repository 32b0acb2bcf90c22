"""The store that a configuration describes."""

from pathlib import Path

from configs.placement_sections import StorageSection
from tasks.storage.read_cache import GIB, ReadCache, default_cache
from tasks.storage.store import ArtifactStore


def open_store(storage: StorageSection, run: str) -> ArtifactStore:
    """A run's store, with the cache that is asked for; nothing is written yet.

    Raises:
        InputError: credentials in a URL, one of an unknown kind, or of one whose package is not installed.
    """
    limit = int(storage.cache_gib * GIB)
    if storage.cache_dir is None:
        return ArtifactStore(storage.root, run, default_cache(limit))
    return ArtifactStore(storage.root, run, ReadCache(Path(storage.cache_dir).expanduser(), limit))


def described(store: ArtifactStore) -> StorageSection:
    """The root as others find it; where copies of it are kept is the affair of each machine."""
    root, cache = store.filesystem.unstrip_protocol(store.root), store.files.cache
    return StorageSection(root=root) if cache is None else StorageSection(root=root, cache_gib=cache.limit / GIB)
